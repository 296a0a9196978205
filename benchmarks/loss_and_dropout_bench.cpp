// Dropout, and softmax cross entropy over a large vocabulary, forward and backward: ours and
// LibTorch's. In gigabytes a second that have to move, beside what this machine moves in y += x,
// the plainest update in place.
//
//     loss_and_dropout_bench [rows, default 1024] [rounds, default 7]
#include "benchmarks/support/interleave.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/nn/fused_cross_entropy.h"
#include "semitone/nn/fused_dropout.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace {

namespace nn = semitone::nn;
using semitone::bench::Contender;

constexpr std::int64_t kWidth = 4096;     // of a feed-forward layer that dropout follows
constexpr std::int64_t kClasses = 18000;  // a vocabulary
constexpr std::int64_t kStream = 64 * 1024 * 1024;
constexpr double kP = 0.1;

// What a contender moves at least.
struct Work {
  Contender contender;
  double bytes;
};

void report(const std::string& title, const std::vector<Work>& works, int rounds) {
  const auto y = at::ones({kStream});
  const auto x = at::ones({kStream});
  std::vector<Contender> contenders;
  for (const Work& work : works) contenders.push_back(work.contender);
  contenders.push_back({"y += x", [&] { y.add_(x); }});
  const auto timings = semitone::bench::interleave(contenders, rounds, 1);
  semitone::bench::print(title, timings, 1e-3, "ms");
  const double stream = 12.0 * static_cast<double>(kStream) / timings.back().min_seconds;
  for (std::size_t i = 0; i < works.size(); ++i) {
    const double rate = works[i].bytes / timings[i].min_seconds;
    fmt::print("{:<34} {:>8.1f} GB/s of what has to move, {:.0f} % of y += x\n", timings[i].name,
               rate / 1e9, 100 * rate / stream);
  }
  fmt::print("\n");
}

void require(bool holds, const char* what) {
  if (!holds) throw semitone::Error("bench.loss_and_dropout", what, "something else");
}

using Dropout = std::function<at::Tensor(const at::Tensor&)>;

// That a share p is 0 and the rest scaled, and the gradient the same.
void check(const Dropout& dropout, const at::Tensor& values) {
  const at::Tensor input = at::ones_like(values).requires_grad_();
  const at::Tensor output = dropout(input);
  output.sum().backward();
  const at::Tensor kept = output.detach().to(at::kFloat).ne(0);
  const double share = kept.to(at::kFloat).mean().item<double>();
  const double sigma = std::sqrt(kP * (1 - kP) / static_cast<double>(values.numel()));
  require(std::abs(share - (1 - kP)) < 5 * sigma + 0x1p-17, "the share 1 - p of elements");
  require(at::allclose(output.detach().to(at::kFloat), kept.to(at::kFloat) / (1 - kP), 5e-3, 0),
          "elements that are 0 or scaled");
  require(output.detach().equal(input.grad()), "the same mask in the gradient");
}

void compare_dropout(std::int64_t rows, c10::ScalarType dtype, int rounds) {
  const at::Tensor input = torch::randn({rows, kWidth}).to(dtype).requires_grad_();
  const at::Tensor residual = torch::randn({rows, kWidth}).to(dtype).requires_grad_();
  const at::Tensor grad = torch::randn({rows, kWidth}).to(dtype);
  const Dropout theirs = [](const at::Tensor& x) { return at::dropout(x, kP, true); };
  const Dropout ours = [](const at::Tensor& x) { return nn::fused_dropout(x, kP); };
  check(theirs, input.detach());
  check(ours, input.detach());
  const auto run = [&](const Dropout& dropout) {
    torch::autograd::grad({dropout(input)}, {input}, {grad});
  };
  const auto run_add = [&](const Dropout& dropout) {
    torch::autograd::grad({dropout(input)}, {input, residual}, {grad});
  };
  // In and out, twice; and the residual.
  const double bytes = static_cast<double>(input.nbytes());
  report(fmt::format("dropout of {} x {} {}, forward and backward", rows, kWidth,
                     semitone::dtype_name(dtype)),
         {{{"at::dropout", [&] { run(theirs); }}, 4 * bytes},
          {{"fused_dropout", [&] { run(ours); }}, 4 * bytes},
          {{"residual + at::dropout",
            [&] { run_add([&](const at::Tensor& x) { return residual + theirs(x); }); }},
           5 * bytes},
          {{"fused_dropout_add",
            [&] {
              run_add([&](const at::Tensor& x) { return nn::fused_dropout_add(x, residual, kP); });
            }},
           5 * bytes}},
         rounds);
}

void compare_cross_entropy(std::int64_t rows, c10::ScalarType dtype, int rounds) {
  const at::Tensor logits = torch::randn({rows, kClasses}).to(dtype).requires_grad_();
  const at::Tensor target = torch::randint(kClasses, {rows}, torch::kLong);
  // As autocast computes it.
  const auto theirs = [&] { return at::cross_entropy_loss(logits.to(at::kFloat), target); };
  const auto ours = [&] { return nn::fused_cross_entropy(logits, target); };
  const auto gradient = [&](const at::Tensor& loss) {
    return torch::autograd::grad({loss}, {logits})[0];
  };
  require(at::allclose(ours(), theirs(), 1e-5, 0), "LibTorch's loss");
  require(at::allclose(gradient(ours()), gradient(theirs()), 1e-2, 1e-9), "LibTorch's gradient");
  // Over logits that are no leaf.
  const at::Tensor leaf = logits.detach().clone().requires_grad_();
  const auto in_place = nn::FusedCrossEntropyOptions().inplace_backward(true);
  const auto run_in_place = [&] {
    const at::Tensor over = leaf.view({rows, kClasses});
    return torch::autograd::grad({nn::fused_cross_entropy(over, target, in_place)}, {over})[0];
  };
  require(run_in_place().equal(gradient(ours())), "the same gradient in place");
  // Logits in, and once more, gradient out.
  const double bytes = 3 * static_cast<double>(logits.nbytes());
  report(fmt::format("cross entropy of {} x {} {}, forward and backward", rows, kClasses,
                     semitone::dtype_name(dtype)),
         {{{"at::cross_entropy_loss", [&] { gradient(theirs()); }}, bytes},
          {{"fused_cross_entropy", [&] { gradient(ours()); }}, bytes},
          {{"fused_cross_entropy, in place", [&] { run_in_place(); }}, bytes}},
         rounds);
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t rows = argc > 1 ? std::stol(argv[1]) : 1024;
  const int rounds = argc > 2 ? std::stoi(argv[2]) : 7;
  torch::manual_seed(0);
  fmt::print("{} threads\n\n", at::get_num_threads());
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) compare_dropout(rows, dtype, rounds);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16})
    compare_cross_entropy(rows, dtype, rounds);
}
