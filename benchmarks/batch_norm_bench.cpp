// What synchronised batch normalisation costs a rank besides the waiting: its passes over a share,
// against LibTorch's batch normalisation of the same share.

#include "benchmarks/support/interleave.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/kernels/batch_norm.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <tuple>

namespace {

namespace kernels = semitone::kernels;
using semitone::bench::Contender;

constexpr double kEps = 1e-5;

struct Layer {
  torch::Tensor input;
  torch::Tensor grad;
  torch::Tensor weight;
  torch::Tensor bias;
};

torch::Tensor forward(const Layer& layer, torch::Tensor& mean, torch::Tensor& invstd) {
  const auto moments = kernels::moments(layer.input);
  const auto count = layer.input.numel() / layer.input.size(1);
  mean = moments.mean;
  invstd = moments.m2.div(count).add_(kEps).rsqrt_();
  return kernels::normalize(layer.input, mean, layer.weight.mul(invstd), layer.bias, {}, false);
}

torch::Tensor backward(const Layer& layer, const torch::Tensor& mean, const torch::Tensor& invstd) {
  const auto sums = kernels::gradient_sums(layer.grad, layer.input, mean);
  const auto count = layer.input.numel() / layer.input.size(1);
  const auto scale = layer.weight.mul(invstd);
  return kernels::gradient_of_input(
      layer.grad, layer.input, mean, scale,
      sums.grad_times_centred.div(-count).mul_(invstd.square()).mul_(scale),
      sums.grad.div(-count).mul_(scale));
}

std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> libtorch_forward(const Layer& layer) {
  return at::native_batch_norm(layer.input, layer.weight, layer.bias, {}, {}, /*training=*/true,
                               0.1, kEps);
}

torch::Tensor libtorch_backward(const Layer& layer, const torch::Tensor& mean,
                                const torch::Tensor& invstd) {
  return std::get<0>(at::native_batch_norm_backward(layer.grad, layer.input, layer.weight, {}, {},
                                                    mean, invstd,
                                                    /*train=*/true, kEps, {true, true, true}));
}

void require_close(const torch::Tensor& got, const torch::Tensor& want, const char* what) {
  const double tolerance = got.scalar_type() == torch::kFloat ? 1e-4 : 2e-2;
  if (!torch::allclose(got, want, tolerance, tolerance))
    throw semitone::Error("bench.batch_norm", "LibTorch's values", "others", what);
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  for (const auto shape :
       {std::array<std::int64_t, 4>{16, 64, 56, 56}, {16, 512, 14, 14}, {16, 2048, 7, 7}}) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
      for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
        const auto random = [&] { return torch::randn(shape).to(dtype).contiguous(format); };
        const Layer layer{random(), random(), torch::rand({shape[1]}) + 0.5,
                          torch::randn({shape[1]})};
        torch::Tensor mean;
        torch::Tensor invstd;
        const auto [output, saved_mean, saved_invstd] = libtorch_forward(layer);
        require_close(forward(layer, mean, invstd), output, "output");
        require_close(backward(layer, mean, invstd),
                      libtorch_backward(layer, saved_mean, saved_invstd), "gradient");
        const auto name =
            fmt::format("{} {} {}", c10::str(at::IntArrayRef(shape)), semitone::dtype_name(dtype),
                        format == at::MemoryFormat::Contiguous ? "NCHW" : "NHWC");
        semitone::bench::print(
            name + ", forward",
            semitone::bench::interleave({{"LibTorch", [&] { libtorch_forward(layer); }},
                                         {"semitone", [&] { forward(layer, mean, invstd); }}},
                                        20, 3),
            1e-3, "ms");
        semitone::bench::print(
            name + ", backward",
            semitone::bench::interleave(
                {{"LibTorch",
                  [&, m = saved_mean, i = saved_invstd] { libtorch_backward(layer, m, i); }},
                 {"semitone", [&] { backward(layer, mean, invstd); }}},
                20, 3),
            1e-3, "ms");
      }
    }
  }
}
