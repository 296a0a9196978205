// The operators between the products: activations, sums, dropout, pooling.
#include "src/nn/pointwise.h"

#include "benchmarks/kernels/differentiable.h"
#include "semitone/nn/fused_dropout.h"
#include "semitone/nn/fused_gelu.h"
#include "src/nn/max_pool.h"

#include <torch/torch.h>

#include <cmath>

namespace semitone::bench {
namespace {

constexpr double kP = 0.1;
constexpr std::int64_t kHidden = 4096;  // of a feed-forward layer
constexpr std::uint64_t kSeed = 7;
constexpr Tolerance kPointwise{.share_of_largest = 1e-6};

at::Tensor random(const std::vector<std::int64_t>& shape, at::ScalarType dtype,
                  at::Device device = at::kCPU) {
  const at::Tensor values = torch::randn(shape, device).to(dtype);
  return shape.size() == 4 ? values.contiguous(at::MemoryFormat::ChannelsLast) : values;
}

std::vector<Row> proved(const Differentiable& both, const Tolerance& tolerance) {
  prove(both, {.definition = both.libtorchs, .tolerance = tolerance});
  return rows_of(both);
}

std::vector<Row> gelu(std::int64_t rows, at::ScalarType dtype, const std::string& form,
                      bool with_bias, at::Device device) {
  const at::Tensor x = random({rows, kHidden}, dtype, device);
  Differentiable both{.inputs = {x},
                      .grad = random({rows, kHidden}, dtype, device),
                      .ours = [form](const Tensors& of) { return nn::fused_gelu(of[0], form); },
                      .libtorchs = [form](const Tensors& of) { return at::gelu(of[0], form); },
                      .forward = {moved("x", x), moved("y", x)},
                      .backward = {moved("dy", x), moved("x", x), moved("dx", x)}};
  if (with_bias) {
    both.inputs.push_back(random({kHidden}, dtype, device));
    both.ours = [form](const Tensors& of) { return nn::fused_bias_gelu(of[0], of[1], form); };
    both.libtorchs = [form](const Tensors& of) { return at::gelu(of[0] + of[1], form); };
  }
  // 16-bit values have an error of 5e-6; the bias's gradient is a sum.
  return proved(both, {.share_of_largest = 1e-5});
}

std::vector<Row> relu(const std::vector<std::int64_t>& shape, at::ScalarType dtype) {
  const at::Tensor x = random(shape, dtype);
  return proved({.inputs = {x},
                 .grad = random(shape, dtype),
                 .ours = [](const Tensors& of) { return nn::relu(of[0]); },
                 .libtorchs = [](const Tensors& of) { return at::relu(of[0]); },
                 .forward = {moved("x", x), moved("y", x)},
                 .backward = {moved("dy", x), moved("y", x), moved("dx", x)}},
                kPointwise);
}

std::vector<Row> add(const std::vector<std::int64_t>& shape, at::ScalarType dtype) {
  const at::Tensor a = random(shape, dtype);
  const at::Tensor b = random(shape, dtype);
  require_within(nn::add(a, b), a.to(at::kDouble) + b.to(at::kDouble), kPointwise, "a sum");
  // In repeated in-place calls, the first summand changes.
  return {{.moved = {moved("a", a), moved("b", b), moved("y", a)},
           .work = [a, b] { nn::add(a, b); },
           .libtorchs = [a, b] { at::add(a, b); }},
          {.pass = "in place",
           .moved = {moved("a", a, 2), moved("b", b)},
           .work = [a = a.clone(), b] { nn::add_(a, b); },
           .libtorchs = [a = a.clone(), b] { a.add_(b); }}};
}

std::vector<Row> max_pool(const std::vector<std::int64_t>& shape, at::ScalarType dtype) {
  const kernels::MaxPool pool{.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}};
  const at::Tensor x = random(shape, dtype);
  const at::Tensor y = at::max_pool2d(x, pool.kernel, pool.stride, pool.padding);
  const Moved places{"places", static_cast<double>(y.numel())};
  return proved({.inputs = {x},
                 .grad = random(y.sizes().vec(), dtype),
                 .ours = [pool](const Tensors& of) { return nn::max_pool2d(of[0], pool); },
                 .libtorchs =
                     [pool](const Tensors& of) {
                       return at::max_pool2d(of[0], pool.kernel, pool.stride, pool.padding);
                     },
                 .forward = {moved("x", x), moved("y", y), places},
                 .backward = {moved("dy", y), places, moved("dx", x)}},
                kPointwise);
}

// Checks that a share 1 - p is kept and scaled, and that the gradient keeps the same elements. A
// call with the same seed on ones shows which elements are kept.
void prove_dropout(const Differentiable& both) {
  const auto seeded = [&](const Tensors& inputs) {
    torch::manual_seed(kSeed);
    return run(both.ours, inputs, both.grad);
  };
  Tensors ones{at::ones_like(both.inputs[0])};
  if (both.inputs.size() > 1) ones.push_back(at::zeros_like(both.inputs[1]));
  const at::Tensor kept = seeded(ones)[0].gt(0).to(at::kDouble);
  const double share = kept.mean().item<double>();
  const double sigma = std::sqrt(kP * (1 - kP) / static_cast<double>(kept.numel()));
  require(std::abs(share - (1 - kP)) <= 5 * sigma + 0x1p-17, "a share 1 - p that is kept");
  // p is a multiple of 2^-16.
  const double rounded = std::round(kP * 0x1p16) * 0x1p-16;
  const at::Tensor factor = kept / (1 - rounded);
  const Tensors got = seeded(both.inputs);
  at::Tensor want = both.inputs[0].to(at::kDouble) * factor;
  if (both.inputs.size() > 1) want += both.inputs[1].to(at::kDouble);
  require_within(got[0], want, kPointwise, "a result");
  require_within(got[1], both.grad.to(at::kDouble) * factor, kPointwise, "a gradient");
}

std::vector<Row> dropout(std::int64_t rows, at::ScalarType dtype, bool with_residual) {
  const at::Tensor x = random({rows, kHidden}, dtype);
  Differentiable both{.inputs = {x},
                      .grad = random({rows, kHidden}, dtype),
                      .ours = [](const Tensors& of) { return nn::fused_dropout(of[0], kP); },
                      .libtorchs = [](const Tensors& of) { return at::dropout(of[0], kP, true); },
                      .forward = {moved("x", x), moved("y", x)},
                      .backward = {moved("dy", x), moved("dx", x)}};
  if (with_residual) {  // whose gradient is dy
    both.inputs.push_back(random({rows, kHidden}, dtype));
    both.ours = [](const Tensors& of) { return nn::fused_dropout_add(of[0], of[1], kP); };
    both.libtorchs = [](const Tensors& of) { return of[1] + at::dropout(of[0], kP, true); };
    both.forward = {moved("x", x), moved("r", x), moved("y", x)};
  }
  prove_dropout(both);
  return rows_of(both);
}

}  // namespace

void add_pointwise(std::vector<Case>& cases, const Sizes& sizes) {
  const std::int64_t rows = sizes.rows / 4;
  const std::string matrix = name_of_shape({rows, kHidden});
  const auto of_matrices = [&](const std::string& kernel, at::ScalarType dtype, const auto& make) {
    cases.push_back({kernel, dtype, matrix, make});
  };
  const std::vector<std::int64_t> images{sizes.images, 256, 56, 56};
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    of_matrices("GELU", dtype, [=] { return gelu(rows, dtype, "none", false, sizes.device); });
    of_matrices("GELU, tanh", dtype,
                [=] { return gelu(rows, dtype, "tanh", false, sizes.device); });
    of_matrices("bias + GELU", dtype,
                [=] { return gelu(rows, dtype, "none", true, sizes.device); });
    if (!sizes.device.is_cpu()) continue;  // the others are LibTorch's there
    of_matrices("dropout", dtype, [=] { return dropout(rows, dtype, false); });
    of_matrices("dropout + residual", dtype, [=] { return dropout(rows, dtype, true); });
    if (dtype != at::kFloat) {  // a region leaves those of fp32 to LibTorch
      cases.push_back({"ReLU", dtype, name_of_shape(images), [=] { return relu(images, dtype); }});
      cases.push_back({"add", dtype, name_of_shape(images), [=] { return add(images, dtype); }});
    }
    const std::vector<std::int64_t> pooled{sizes.images, 64, 112, 112};
    cases.push_back(
        {"max pool 3x3", dtype, name_of_shape(pooled), [=] { return max_pool(pooled, dtype); }});
  }
}

}  // namespace semitone::bench
