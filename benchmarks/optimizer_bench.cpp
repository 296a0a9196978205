// A step of AdamW in mixed precision and in fp32: FusedAdam, torch::optim::AdamW and
// at::_fused_adamw_ (the kernel behind Python's fused=True). Results are in gigabytes per second
// that have to move, compared with this machine's y += x, the simplest update in place.
//
//     optimizer_bench [millions of parameters, default 100] [rounds, default 7]
#include "benchmarks/support/interleave.h"
#include "benchmarks/support/stream.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_adam.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

namespace optim = semitone::optim;
using semitone::bench::Contender;
using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t kTensor = 4 * 1024 * 1024;  // elements of a tensor: a 2048 x 2048 layer
constexpr std::int64_t kStream = 64 * 1024 * 1024;
constexpr double kLr = 1e-3;
constexpr double kDecay = 0.1;
constexpr double kEps = 1e-8;

Tensors like(const Tensors& tensors, c10::ScalarType dtype) {
  Tensors made;
  for (const at::Tensor& tensor : tensors)
    made.push_back(tensor.detach().to(dtype, false, /*copy=*/true));
  return made;
}

void require_grads(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) tensor.requires_grad_();
}

// The optimizer of Python's fused=True, which LibTorch has as an operator only.
class TorchFusedAdamW {
 public:
  explicit TorchFusedAdamW(Tensors parameters) : parameters_(std::move(parameters)) {
    for (const at::Tensor& parameter : parameters_) {
      m_.push_back(at::zeros_like(parameter));
      v_.push_back(at::zeros_like(parameter));
      steps_.push_back(at::zeros({}, at::kFloat));
    }
  }

  void step() {
    const at::NoGradGuard no_grad;
    Tensors grads;
    for (const at::Tensor& parameter : parameters_) grads.push_back(parameter.grad());
    for (const at::Tensor& step : steps_) step.add_(1);
    at::_fused_adamw_(parameters_, grads, m_, v_, {}, steps_, kLr, 0.9, 0.999, kDecay, kEps, false,
                      false);
  }

 private:
  Tensors parameters_, m_, v_, steps_;
};

// The work of a program without a fused step around its optimizer: gradients to fp32, step,
// rounding. bf16 needs no loss scale.
class StepAround {
 public:
  StepAround(const Tensors& model, const Tensors& masters) : model_(model), masters_(masters) {
    for (std::size_t i = 0; i < model.size(); ++i) {
      grads16_.push_back(model[i].grad());
      grads_.push_back(at::empty_like(masters[i]));
      masters[i].mutable_grad() = grads_[i];
    }
  }

  void operator()(const std::function<void()>& step) const {
    const at::NoGradGuard no_grad;
    at::_foreach_copy_(grads_, grads16_);
    step();
    at::_foreach_copy_(model_, masters_);
  }

 private:
  Tensors model_, masters_, grads16_, grads_;
};

void require_close(const Tensors& got, const Tensors& want, double tolerance,
                   const std::string& who) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double far = (got[i].detach().to(at::kFloat) - want[i].detach().to(at::kFloat))
                           .abs()
                           .max()
                           .item<double>();
    if (!(far <= tolerance)) {
      throw semitone::Error("bench.optimizer", "the parameters of torch::optim::AdamW",
                            fmt::format("{} off by {}", who, far));
    }
  }
}

// Contenders, with the bytes that each has to move.
void report(const std::string& title, std::vector<Contender> contenders, std::vector<double> bytes,
            int rounds) {
  const semitone::bench::Stream stream(kStream);
  contenders.push_back(stream.contender());
  bytes.push_back(stream.bytes());
  const auto timings = semitone::bench::interleave(contenders, rounds, 1);
  semitone::bench::print(title, timings, 1e-3, "ms");
  const auto rate = [&](std::size_t i) { return bytes[i] / timings[i].min_seconds; };
  for (std::size_t i = 0; i < timings.size(); ++i) {
    fmt::print("{:<34} {:>8.1f} GB/s of what has to move, {:.0f} % of y += x\n", timings[i].name,
               rate(i) / 1e9, 100 * rate(i) / rate(timings.size() - 1));
  }
  fmt::print("\n");
}

void compare_mixed(const Tensors& values, const Tensors& grads16, int rounds) {
  const auto options = optim::FusedAdamOptions(kLr).weight_decay(kDecay).eps(kEps);
  const auto with_grads = [&](Tensors model) {
    require_grads(model);
    for (std::size_t i = 0; i < model.size(); ++i) model[i].mutable_grad() = grads16[i];
    return model;
  };
  const auto masters_of = [&](const Tensors& model) {
    Tensors masters = like(model, at::kFloat);
    require_grads(masters);
    return masters;
  };

  const Tensors model = with_grads(like(values, at::kBFloat16));
  const Tensors masters = masters_of(model);
  optim::FusedAdam fused(masters, options);
  optim::ModelCopies copies;
  for (std::size_t i = 0; i < model.size(); ++i)
    copies[masters[i].unsafeGetTensorImpl()] = model[i];
  const auto how = optim::FusedStep().copies(&copies);

  const Tensors split_model = with_grads(like(values, at::kBFloat16));
  optim::FusedAdam split(split_model, optim::FusedAdamOptions(options).split_master(true));

  const Tensors bf16_state_model = with_grads(like(values, at::kBFloat16));
  optim::FusedAdam with_bf16_state(
      bf16_state_model, optim::FusedAdamOptions(options).split_master(true).bf16_state(true));

  const Tensors torch_model = with_grads(like(values, at::kBFloat16));
  const Tensors torch_masters = masters_of(torch_model);
  torch::optim::AdamW adamw(torch_masters,
                            torch::optim::AdamWOptions(kLr).weight_decay(kDecay).eps(kEps));

  const StepAround around_torch(torch_model, torch_masters);

  const Tensors kernel_model = with_grads(like(values, at::kBFloat16));
  const Tensors kernel_masters = masters_of(kernel_model);
  TorchFusedAdamW kernel(kernel_masters);
  const StepAround around_kernel(kernel_model, kernel_masters);

  const std::vector<Contender> contenders{
      {"torch::optim::AdamW", [&] { around_torch([&] { adamw.step(); }); }},
      {"at::_fused_adamw_", [&] { around_kernel([&] { kernel.step(); }); }},
      {"FusedAdam, fp32 masters", [&] { fused.step(how); }},
      {"FusedAdam, split masters", [&] { split.step(optim::FusedStep()); }},
      {"FusedAdam, split, bf16 state", [&] { with_bf16_state.step(optim::FusedStep()); }}};
  for (int i = 0; i < 3; ++i) {
    for (const Contender& contender : contenders) contender.body();
  }
  require_close(kernel_masters, torch_masters, 1e-6, "at::_fused_adamw_");
  require_close(masters, torch_masters, 1e-6, "FusedAdam");
  const auto exact = [](const optim::FusedAdam& optimizer, const Tensors& parameters) {
    Tensors result;
    for (const at::Tensor& parameter : parameters) result.push_back(optimizer.master_of(parameter));
    return result;
  };
  require_close(exact(split, split_model), torch_masters, 1e-6, "FusedAdam with split masters");
  // Three steps of at most lr, of moments that are less than 1/128 off.
  require_close(exact(with_bf16_state, bf16_state_model), torch_masters, 3 * kLr * 1.5 / 128,
                "FusedAdam with state in bf16");
  for (std::size_t i = 0; i < model.size(); ++i) {
    if (!torch::equal(model[i], masters[i].to(at::kBFloat16)))
      throw semitone::Error("bench.optimizer", "a model that is its masters rounded", "another");
  }

  // Gradient 2 in; master, two moments 12 in and 12 out; model 2 out. Split: model and lower half 4
  // in and 4 out, in place of master and model. State in bf16: 4 in and 4 out in place of 8 and 8.
  const auto elements = static_cast<double>(values.size()) * static_cast<double>(kTensor);
  report("bf16 model, fp32 masters, bf16 gradients: AdamW, write the model", contenders,
         {28 * elements, 28 * elements, 28 * elements, 26 * elements, 18 * elements}, rounds);
}

void compare_fp32(const Tensors& values, const Tensors& grads, int rounds) {
  const auto with_grads = [&](Tensors parameters) {
    require_grads(parameters);
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = grads[i];
    return parameters;
  };
  const Tensors ours = with_grads(like(values, at::kFloat));
  const Tensors theirs = with_grads(like(values, at::kFloat));
  const Tensors kernels = with_grads(like(values, at::kFloat));
  optim::FusedAdam fused(ours, optim::FusedAdamOptions(kLr).weight_decay(kDecay).eps(kEps));
  torch::optim::AdamW adamw(theirs, torch::optim::AdamWOptions(kLr).weight_decay(kDecay).eps(kEps));
  TorchFusedAdamW kernel(kernels);
  const std::vector<Contender> contenders{{"torch::optim::AdamW", [&] { adamw.step(); }},
                                          {"at::_fused_adamw_", [&] { kernel.step(); }},
                                          {"FusedAdam", [&] { fused.step(); }}};
  for (int i = 0; i < 3; ++i) {
    for (const Contender& contender : contenders) contender.body();
  }
  require_close(kernels, theirs, 1e-6, "at::_fused_adamw_");
  require_close(ours, theirs, 1e-6, "FusedAdam");
  const auto elements = static_cast<double>(values.size()) * static_cast<double>(kTensor);
  report("fp32 parameters and gradients: AdamW", contenders,
         {28 * elements, 28 * elements, 28 * elements}, rounds);
}

}  // namespace

int main(int argc, char** argv) {
  const double millions = argc > 1 ? std::stod(argv[1]) : 100;
  const int rounds = argc > 2 ? std::stoi(argv[2]) : 7;
  torch::manual_seed(0);
  const auto count =
      static_cast<std::int64_t>(std::ceil(millions * 1e6 / static_cast<double>(kTensor)));
  Tensors values;
  Tensors grads;
  for (std::int64_t i = 0; i < count; ++i) {
    values.push_back(torch::randn({kTensor}).to(at::kBFloat16).to(at::kFloat));
    grads.push_back(torch::randn({kTensor}));
  }
  fmt::print("{:.0f} M parameters, {} threads\n\n", static_cast<double>(count * kTensor) / 1e6,
             at::get_num_threads());
  compare_mixed(values, like(grads, at::kBFloat16), rounds);
  compare_fp32(values, grads, rounds);
}
