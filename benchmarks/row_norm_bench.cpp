// Layer norm, RMS norm and GELU, forward and backward, beside LibTorch's operators.
//
//     row_norm_bench [rows] [columns] [rounds]

#include "benchmarks/support/interleave.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/nn/fused_gelu.h"
#include "semitone/nn/fused_layer_norm.h"
#include "semitone/nn/fused_rms_norm.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <fmt/core.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace {

using semitone::bench::Contender;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

// For the memory speed that the others are set beside.
constexpr std::int64_t kStream = 1 << 24;

// A function of tensors in both implementations. Both run forward, forward with backward.
struct Workload {
  std::string name;
  Tensors inputs;  // the first and the gradient are large
  at::Tensor grad;
  Function ours;
  Function libtorchs;
};

Tensors leaves_of(const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.clone().requires_grad_());
  return leaves;
}

// Output and gradients.
Tensors run(const Function& function, const Tensors& leaves, const at::Tensor& grad) {
  Tensors results{function(leaves)};
  for (const at::Tensor& gradient : torch::autograd::grad({results[0]}, leaves, {grad}))
    results.push_back(gradient);
  return results;
}

void require_close(const Workload& work) {
  Tensors exact;
  for (const at::Tensor& input : work.inputs) exact.push_back(input.to(at::kDouble));
  const Tensors got = run(work.ours, leaves_of(work.inputs), work.grad);
  const Tensors want = run(work.libtorchs, leaves_of(exact), work.grad.to(at::kDouble));
  const double unit = semitone::dtype_limits(work.grad.scalar_type()).epsilon;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double far =
        (got[i].detach().to(at::kDouble) - want[i].detach()).abs().max().item<double>();
    const double size = want[i].detach().abs().max().item<double>();
    if (!(far <= (unit + 1e-5) * size)) {
      throw semitone::Error(
          "bench.row_norm", "what LibTorch computes in fp64",
          fmt::format("result {} of {} off by {} of {}", i, work.name, far, size));
    }
  }
}

void report(const std::string& title, std::vector<Contender> contenders, double bytes, int rounds) {
  const auto y = at::ones({kStream});
  const auto x = at::ones({kStream});
  contenders.push_back({"y += x", [&] { y.add_(x); }});
  const auto timings = semitone::bench::interleave(contenders, rounds, 1);
  semitone::bench::print(title, timings, 1e-3, "ms");
  const double stream = 12.0 * static_cast<double>(kStream) / timings.back().min_seconds;
  for (std::size_t i = 0; i + 1 < timings.size(); ++i) {
    const double rate = bytes / timings[i].min_seconds;
    fmt::print("{:<34} {:>8.1f} GB/s of what has to move, {:.0f} % of y += x\n", timings[i].name,
               rate / 1e9, 100 * rate / stream);
  }
  fmt::print("\n");
}

void compare(const Workload& work, int rounds) {
  require_close(work);
  const Tensors leaves = leaves_of(work.inputs);
  const double bytes = static_cast<double>(work.grad.nbytes());
  const auto forward = [&](const Function& function) {
    return [&leaves, &function] {
      const torch::NoGradGuard no_grad;
      function(leaves);
    };
  };
  const auto both = [&](const Function& function) {
    return [&leaves, &function, &work] { run(function, leaves, work.grad); };
  };
  const std::string dtype = semitone::dtype_name(work.grad.scalar_type());
  // In and out; the backward pass reads two and writes one.
  report(work.name + ", " + dtype + ", forward",
         {{"LibTorch", forward(work.libtorchs)}, {"Semitone", forward(work.ours)}}, 2 * bytes,
         rounds);
  report(work.name + ", " + dtype + ", forward and backward",
         {{"LibTorch", both(work.libtorchs)}, {"Semitone", both(work.ours)}}, 5 * bytes, rounds);
}

}  // namespace

int main(int argc, char** argv) {
  namespace nn = semitone::nn;
  const std::int64_t rows = argc > 1 ? std::stoll(argv[1]) : 8192;
  const std::int64_t columns = argc > 2 ? std::stoll(argv[2]) : 1024;
  const int rounds = argc > 3 ? std::stoi(argv[3]) : 7;
  torch::manual_seed(0);
  fmt::print("{} rows of {}, {} threads\n\n", rows, columns, at::get_num_threads());
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    const at::Tensor input = torch::randn({rows, columns}).to(dtype);
    const at::Tensor grad = torch::randn({rows, columns}).to(dtype);
    const at::Tensor weight = torch::randn({columns}).to(dtype);
    const at::Tensor bias = torch::randn({columns}).to(dtype);
    compare(
        {"layer norm",
         {input, weight, bias},
         grad,
         [&](const Tensors& of) { return nn::fused_layer_norm(of[0], {columns}, of[1], of[2]); },
         [&](const Tensors& of) { return at::layer_norm(of[0], {columns}, of[1], of[2]); }},
        rounds);
    compare({"RMS norm",
             {input, weight},
             grad,
             [&](const Tensors& of) { return nn::fused_rms_norm(of[0], {columns}, of[1]); },
             [&](const Tensors& of) { return at::rms_norm(of[0], {columns}, of[1]); }},
            rounds);
    for (const std::string form : {"none", "tanh"}) {
      compare({"GELU, approximate '" + form + "'",
               {input},
               grad,
               [&](const Tensors& of) { return nn::fused_gelu(of[0], form); },
               [&](const Tensors& of) { return at::gelu(of[0], form); }},
              rounds);
    }
    compare({"bias and GELU",
             {input, bias},
             grad,
             [&](const Tensors& of) { return nn::fused_bias_gelu(of[0], of[1]); },
             [&](const Tensors& of) { return at::gelu(of[0] + of[1]); }},
            rounds);
  }
}
