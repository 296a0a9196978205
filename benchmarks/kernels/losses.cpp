#include "benchmarks/kernels/differentiable.h"
#include "semitone/nn/fused_cross_entropy.h"
#include "semitone/recompute/linear_cross_entropy.h"
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

// The head of a language model and its loss, in chunks of classes or with all logits in memory.
std::vector<Row> head_and_loss(bool in_chunks, std::int64_t tokens, at::ScalarType dtype,
                               at::Device device) {
  constexpr std::int64_t kFeatures = 768;
  const at::Tensor x = torch::randn({tokens, kFeatures}, device).to(dtype);
  const at::Tensor weight = (torch::randn({kClasses, kFeatures}, device) / 16).to(dtype);
  const at::Tensor target =
      torch::randint(kClasses, {tokens}, at::dtype(torch::kLong).device(device));
  const Differentiable both{
      .inputs = {x, weight},
      .grad = at::full({}, static_cast<double>(tokens), at::dtype(at::kFloat).device(device)),
      .ours =
          [=](const Tensors& of) {
            return in_chunks ? nn::linear_cross_entropy(of[0], of[1], target)
                             : nn::fused_cross_entropy(at::linear(of[0], of[1]), target);
          },
      .libtorchs =
          [target](const Tensors& of) {  // as autocast computes it
            return at::cross_entropy_loss(at::linear(of[0], of[1]).to(at::kFloat), target);
          },
      .forward = {},
      .backward = {}};
  prove(both, {.definition =
                   [target](const Tensors& of) {
                     return at::cross_entropy_loss(at::linear(of[0], of[1]), target);
                   },
               .tolerance = {.share_of_largest = 2e-2}});
  std::vector<Row> rows = rows_of(both);
  for (Row& row : rows) {
    const int products = row.pass == "forward" ? 1 : in_chunks ? 3 : 2;
    row.operations = 2.0 * products * static_cast<double>(tokens * kFeatures * kClasses);
  }
  return rows;
}

}  // namespace

void add_losses(std::vector<Case>& cases, const Sizes& sizes) {
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    cases.push_back({"cross entropy", dtype, name_of_shape({sizes.tokens, kClasses}),
                     [=] { return cross_entropy(sizes.tokens, dtype, sizes.device); }});
    for (const bool in_chunks : {false, true}) {
      cases.push_back({in_chunks ? "linear_cross_entropy" : "linear, then cross entropy", dtype,
                       name_of_shape({sizes.tokens, kClasses}), [=] {
                         return head_and_loss(in_chunks, sizes.tokens, dtype, sizes.device);
                       }});
    }
  }
}

}  // namespace semitone::bench
