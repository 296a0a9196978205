// Attention in blocks, on processors that have a kernel for it.
#include "src/kernels/attention.h"

#include "benchmarks/kernels/differentiable.h"
#include "src/nn/attention.h"

#include <torch/torch.h>

#include <cmath>
#include <optional>

namespace semitone::bench {
namespace {

struct Shape {
  std::int64_t batch, heads, length;
};

constexpr std::int64_t kSize = 64;  // of a head
constexpr double kDropped = 0.1;

// (N, heads, length, D) in the layout in which models make it.
at::Tensor heads_of(const Shape& shape) {
  return torch::randn({shape.batch, shape.length, shape.heads, kSize})
      .to(at::kBFloat16)
      .transpose(1, 2);
}

// Sequences of lengths from 1 / N of the longest to all of it.
at::Tensor padding(const Shape& shape) {
  const at::Tensor lengths = torch::arange(1, shape.batch + 1).mul(shape.length);
  return torch::arange(shape.length).mul(shape.batch) < lengths.view({-1, 1, 1, 1});
}

std::vector<Row> attention(const Shape& shape, const kernels::Attention& settings) {
  const at::Tensor query = heads_of(shape);
  const double p = settings.dropout.has_value() ? kDropped : 0;
  const Differentiable both{
      .inputs = {query, heads_of(shape), heads_of(shape)},
      .grad = torch::randn(query.sizes()).to(at::kBFloat16).contiguous(),
      .ours = [=](const Tensors& of) { return nn::attention(of[0], of[1], of[2], settings); },
      .libtorchs =
          [=](const Tensors& of) {
            const auto mask = settings.mask.defined() ? std::optional(settings.mask) : std::nullopt;
            return at::scaled_dot_product_attention(of[0], of[1], of[2], mask, p, settings.causal,
                                                    settings.scale);
          },
      .forward = {},
      .backward = {}};
  prove(both, {.definition =
                   [=](const Tensors& of) {
                     return kernels::ref::attention(of[0], of[1], of[2], settings).output;
                   },
               .tolerance = {.share_of_largest = 2e-2}});
  // Those of the scores that are not masked.
  double scores = static_cast<double>(shape.batch * shape.heads * shape.length * shape.length);
  if (settings.causal) scores /= 2;
  if (settings.mask.defined()) scores *= settings.mask.to(at::kDouble).mean().item<double>();
  std::vector<Row> rows = rows_of(both);
  for (Row& row : rows) row.operations = 2.0 * kSize * scores * (row.pass == "forward" ? 2 : 5);
  return rows;
}

}  // namespace

void add_attention(std::vector<Case>& cases, const Sizes& sizes) {
  const at::Tensor one = torch::ones({1, 1, 1, kSize}, at::kBFloat16);
  if (!sizes.device.is_cpu() || !kernels::has_attention_kernel(one, one, one, {.scale = 1})) return;
  const double scale = 1 / std::sqrt(static_cast<double>(kSize));
  // The encoder's, the decoder's and a longer sequence.
  const std::vector<Shape> shapes =
      sizes.tokens < 128 ? std::vector<Shape>{{2, 2, 32}}
                         : std::vector<Shape>{{8, 16, 128}, {4, 12, 512}, {1, 8, 2048}};
  for (const Shape& shape : shapes) {
    const auto add = [&](const std::string& name, const kernels::Attention& settings) {
      cases.push_back({"attention" + name, at::kBFloat16,
                       name_of_shape({shape.batch, shape.heads, shape.length, kSize}),
                       [=] { return attention(shape, settings); }});
    };
    add("", {.scale = scale});
    add(", causal", {.scale = scale, .causal = true});
    if (shape.batch > 1) add(", padded", {.scale = scale, .mask = padding(shape)});
    kernels::Attention with_dropout{.scale = scale};
    with_dropout.dropout = kernels::Dropout(kDropped, {.seed = 1});
    add(", dropout", with_dropout);
  }
}

}  // namespace semitone::bench
