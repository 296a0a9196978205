#include "benchmarks/kernels/differentiable.h"
#include "semitone/nn/fused_layer_norm.h"
#include "semitone/nn/fused_rms_norm.h"
#include "src/nn/batch_norm.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <array>

namespace semitone::bench {
namespace {

constexpr double kEps = 1e-5;
constexpr std::int64_t kColumns = 1024;
// Sums of many terms in fp32.
constexpr Tolerance kSums{.share_of_largest = 1e-5};

struct Batch {
  std::vector<std::int64_t> shape;
  at::MemoryFormat format = at::MemoryFormat::ChannelsLast;
  bool relu = false;
  bool residual = false;

  std::string name() const {
    return name_of_shape(shape) + (format == at::MemoryFormat::Contiguous ? " NCHW" : "");
  }
};

std::vector<Row> batch_norm(const Batch& batch, at::ScalarType dtype, at::Device device) {
  const auto random = [&] {
    return torch::randn(batch.shape, device).to(dtype).contiguous(batch.format);
  };
  // Input, weight, bias and the residual if there is one.
  Tensors inputs{random(), torch::rand({batch.shape[1]}, device) + 0.5,
                 torch::randn({batch.shape[1]}, device)};
  if (batch.residual) inputs.push_back(random());
  const auto ours = [relu = batch.relu](const Tensors& of) {
    return nn::batch_norm(of[0], {.component = "bench.batch_norm",
                                  .weight = of[1],
                                  .bias = of[2],
                                  .running_mean = {},
                                  .running_var = {},
                                  .momentum = 0.1,
                                  .eps = kEps,
                                  .residual = of.size() > 3 ? of[3] : at::Tensor(),
                                  .relu = relu});
  };
  const auto sum = [](const Tensors& of) {
    const at::Tensor result = at::batch_norm(of[0], of[1], of[2], {}, {}, /*training=*/true, 0.1,
                                             kEps, /*cudnn_enabled=*/false);
    return of.size() > 3 ? result + of[3] : result;
  };
  const auto libtorchs = [sum, relu = batch.relu](const Tensors& of) {
    return relu ? sum(of).relu_() : sum(of);
  };
  const at::Tensor& x = inputs[0];
  Differentiable both{.inputs = inputs,
                      .grad = random(),
                      .ours = ours,
                      .libtorchs = libtorchs,
                      .forward = {moved("x", x), moved("y", x)},
                      .backward = {moved("dy", x), moved("x", x), moved("dx", x)}};
  if (batch.residual) {
    both.forward = {moved("x", x), moved("r", x), moved("y", x)};
    // Without a residual, x tells where the ReLU was 0.
    both.backward = {moved("dy", x), moved("x", x), moved("y", x), moved("dx", x), moved("dr", x)};
  }
  prove(both, {.definition = sum, .tolerance = kSums, .relu = batch.relu});
  return rows_of(both);
}

std::vector<Row> row_norm(std::int64_t rows, at::ScalarType dtype, bool centred,
                          at::Device device) {
  const auto random = [&](at::IntArrayRef shape) { return torch::randn(shape, device).to(dtype); };
  const at::Tensor x = random({rows, kColumns});
  Differentiable both{.inputs = {x, random({kColumns})},
                      .grad = random({rows, kColumns}),
                      .ours = {},
                      .libtorchs = {},
                      .forward = {moved("x", x), moved("y", x)},
                      .backward = {moved("dy", x), moved("x", x), moved("dx", x)}};
  if (centred) {
    both.inputs.push_back(random({kColumns}));
    both.ours = [](const Tensors& of) {
      return nn::fused_layer_norm(of[0], {kColumns}, of[1], of[2], kEps);
    };
    both.libtorchs = [](const Tensors& of) {
      return at::layer_norm(of[0], {kColumns}, of[1], of[2], kEps);
    };
  } else {
    both.ours = [](const Tensors& of) {
      return nn::fused_rms_norm(of[0], {kColumns}, of[1], kEps);
    };
    both.libtorchs = [](const Tensors& of) { return at::rms_norm(of[0], {kColumns}, of[1], kEps); };
  }
  prove(both, {.definition = both.libtorchs, .tolerance = kSums});
  return rows_of(both);
}

}  // namespace

void add_norms(std::vector<Case>& cases, const Sizes& sizes) {
  const auto add_batch = [&](const std::string& kernel, const Batch& batch, at::ScalarType dtype) {
    cases.push_back({kernel, dtype, batch.name(),
                     [=, device = sizes.device] { return batch_norm(batch, dtype, device); }});
  };
  const auto images = sizes.images;
  const Batch first{.shape = {images, 256, 56, 56}};
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    add_batch("batch norm", first, dtype);
    add_batch("batch norm + ReLU", {.shape = first.shape, .format = first.format, .relu = true},
              dtype);
    add_batch("batch norm + add + ReLU",
              {.shape = first.shape, .format = first.format, .relu = true, .residual = true},
              dtype);
    if (dtype != at::kHalf) {
      add_batch("batch norm", {.shape = first.shape, .format = at::MemoryFormat::Contiguous},
                dtype);
      add_batch("batch norm", {.shape = {images, 2048, 7, 7}}, dtype);
    }
    const auto shape = name_of_shape({sizes.rows, kColumns});
    for (const bool centred : {true, false}) {
      cases.push_back({centred ? "layer norm" : "RMS norm", dtype, shape,
                       [=] { return row_norm(sizes.rows, dtype, centred, sizes.device); }});
    }
  }
}

}  // namespace semitone::bench
