#include "benchmarks/kernels/differentiable.h"
#include "semitone/nn/fused_cross_entropy.h"
#include "src/kernels/cross_entropy.h"

#include <torch/torch.h>

namespace semitone::bench {
namespace {

constexpr std::int64_t kClasses = 18000;  // a vocabulary

std::vector<Row> cross_entropy(std::int64_t tokens, at::ScalarType dtype, at::Device device) {
  const at::Tensor x = torch::randn({tokens, kClasses}, device).to(dtype);
  const at::Tensor target =
      torch::randint(kClasses, {tokens}, at::dtype(torch::kLong).device(device));
  // The scale of a loss, without which most gradients are 0 in fp16.
  const at::Tensor scale =
      at::full({}, static_cast<double>(tokens), at::dtype(at::kFloat).device(device));
  const Differentiable both{
      .inputs = {x},
      .grad = scale,
      .ours = [target](const Tensors& of) { return nn::fused_cross_entropy(of[0], target); },
      .libtorchs =
          [target](const Tensors& of) {  // as autocast computes it
            return at::cross_entropy_loss(of[0].to(at::kFloat), target);
          },
      .forward = {moved("x", x)},
      .backward = {moved("x", x), moved("dx", x)}};
  prove(both, {.definition =
                   [target](const Tensors& of) { return at::cross_entropy_loss(of[0], target); },
               .tolerance = {.share_of_largest = 1e-6}});

  // Overwrites the logits, so repeated calls compute with other values; that does not matter.
  const at::Tensor logits = x.clone();
  const kernels::ClassTargets targets{target, -100, 0};
  const kernels::RowLosses losses = kernels::cross_entropy(logits, targets);
  const auto gradient = [=](bool in_place) {
    return kernels::cross_entropy_gradient(logits, targets, losses, at::ones({}, logits.device()),
                                           in_place);
  };
  const at::Tensor want = gradient(false);
  require(at::equal(gradient(true), want) && at::equal(logits, want), "the same gradient in place");

  std::vector<Row> rows = rows_of(both);
  rows.push_back({.pass = "backward, in place", .moved = {moved("x", x, 2)}, .work = [gradient] {
                    gradient(true);
                  }});
  return rows;
}

}  // namespace

void add_losses(std::vector<Case>& cases, const Sizes& sizes) {
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    cases.push_back({"cross entropy", dtype, name_of_shape({sizes.tokens, kClasses}),
                     [=] { return cross_entropy(sizes.tokens, dtype, sizes.device); }});
  }
}

}  // namespace semitone::bench
