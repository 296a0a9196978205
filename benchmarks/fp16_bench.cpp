// fp16 on the CPU: a matrix product and a convolution in LibTorch's own fp16, in a region that
// emulates fp16 (inputs rounded, sums in fp32, the result rounded once), and in fp32.
// ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 makes the processor one without fp16 instructions.
//
//     fp16_bench [size of the matrices, default 1024] [rounds, default 5]
#include "benchmarks/support/interleave.h"
#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <string>

namespace {

namespace amp = semitone::amp;
using Product = at::Tensor (*)(const at::Tensor& a, const at::Tensor& b);

void compare(const std::string& title, Product product, const at::Tensor& a, const at::Tensor& b,
             double operations, int rounds) {
  const at::Tensor a16 = a.to(at::kHalf);
  const at::Tensor b16 = b.to(at::kHalf);
  const at::Tensor a32 = a16.to(at::kFloat);
  const at::Tensor b32 = b16.to(at::kFloat);
  const auto policy = amp::CastPolicy::semitone(at::kHalf).emulation(amp::Emulation::always);
  const auto emulated = [&] {
    const amp::Autocast region(policy);
    return product(a16, b16);
  };
  if (!at::equal(emulated(), product(a32, b32).to(at::kHalf)))
    throw semitone::Error("bench.fp16", "the product in fp32, rounded, of " + title, "another");

  at::Tensor result;
  const auto timings =
      semitone::bench::interleave({{"LibTorch, fp16", [&] { result = product(a16, b16); }},
                                   {"emulated", [&] { result = emulated(); }},
                                   {"LibTorch, fp32", [&] { result = product(a32, b32); }}},
                                  rounds, 1);
  semitone::bench::print(title, timings, 1e-3, "ms");
  for (const auto& timing : timings)
    fmt::print("{:<34} {:>8.1f} GFLOP/s\n", timing.name, operations / timing.min_seconds / 1e9);
  fmt::print("\n");
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t size = argc > 1 ? std::stoll(argv[1]) : 1024;
  const int rounds = argc > 2 ? std::stoi(argv[2]) : 5;
  const at::NoGradGuard no_grad;
  torch::manual_seed(0);
  fmt::print("{} threads\n\n", at::get_num_threads());
  const auto n = static_cast<double>(size);
  compare(
      fmt::format("matmul of {0} x {0}", size),
      [](const at::Tensor& a, const at::Tensor& b) { return at::matmul(a, b); },
      torch::randn({size, size}), torch::randn({size, size}), 2 * n * n * n, rounds);
  compare(
      "conv2d, 64 to 64 channels, 3 x 3, of 8 images of 56 x 56",
      [](const at::Tensor& images, const at::Tensor& weight) {
        return at::conv2d(images, weight, {}, 1, 1);
      },
      torch::randn({8, 64, 56, 56}), torch::randn({64, 64, 3, 3}), 2.0 * 8 * 56 * 56 * 64 * 64 * 9,
      rounds);
}
