#pragma once

#include "semitone/amp/initialize.h"
#include "tests/support/accelerator/accelerator.h"
#include "tests/support/tensors.h"

#include <torch/nn.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

// The same training on the CPU and on the pretend accelerator.
namespace semitone::test::accelerator {

// Layers of every kind that the levels treat in different ways.
struct NormedNetImpl : torch::nn::Module {
  NormedNetImpl() {
    register_module("first", first);
    register_module("batch_norm", batch_norm);
    register_module("layer_norm", layer_norm);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) {
    return second(layer_norm(torch::relu(batch_norm(first(x)))));
  }
  torch::nn::Linear first{torch::nn::LinearOptions(6, 16).bias(false)};  // BatchNorm removes it
  torch::nn::Linear second{16, 3};
  torch::nn::BatchNorm1d batch_norm{16};
  torch::nn::LayerNorm layer_norm{torch::nn::LayerNormOptions({16})};
};
TORCH_MODULE(NormedNet);

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

struct Training {
  c10::Device device = at::kCPU;
  amp::Options options;
  MakeOptimizer make;
  int steps = 4;
  int overflow_at = -1;        // in this step the loss is infinite
  double max_norm = 0;         // of the gradients; 0: not clipped
  bool looks_at_steps = true;  // at once; false: never
  bool is_exact = true;        // false: 16-bit weights or small gradients amplify rounding errors
};

struct Trained {
  std::vector<double> losses;
  std::vector<amp::Step> steps;
  std::int64_t skipped = 0;
  double scale = 0;
  std::vector<at::Tensor> parameters;  // on the CPU, in fp32
  bool is_exact = false;               // see Training
  Counts forward_and_backward;         // of all steps together
  Counts step;
};

inline Counts operator-(const Counts& a, const Counts& b) {
  return {a.reads - b.reads, a.waits - b.waits, a.uploads - b.uploads,
          a.unpinned_async_copies - b.unpinned_async_copies};
}

inline void add(Counts& to, const Counts& from) {
  to = to - (Counts{} - from);
}

// The net of a seed, in training mode on the device.
inline NormedNet make_net(c10::Device device) {
  torch::manual_seed(7);
  NormedNet net;
  if (!device.is_cpu()) move(*net, device);
  return net;
}

inline at::Tensor input_of(int step, c10::Device device) {
  torch::manual_seed(100 + static_cast<std::uint64_t>(step));
  return torch::randn({12, 6}).to(device);
}

inline at::Tensor loss_of(const at::Tensor& output, const at::Tensor& input) {
  return torch::mse_loss(output.to(at::kFloat), input.narrow(1, 0, 3));
}

inline Trained train(const Training& training) {
  auto net = make_net(training.device);
  const auto optimizer = training.make(net->parameters());
  auto mixed = amp::initialize(net, *optimizer, amp::Options(training.options).verbosity(0));
  Trained trained;
  for (int i = 0; i < training.steps; ++i) {
    const at::Tensor input = input_of(i, training.device);
    optimizer->zero_grad();
    const Counts begin = counts();
    at::Tensor loss = loss_of(mixed.forward(net, input), input);
    if (i == training.overflow_at) loss = loss * std::numeric_limits<float>::infinity();
    mixed.scale_loss(loss, *optimizer).backward();
    add(trained.forward_and_backward, counts() - begin);
    if (training.max_norm > 0) mixed.clip_grad_norm_(*optimizer, training.max_norm);
    const Counts before = counts();
    const amp::StepResult step = mixed.step(*optimizer);
    add(trained.step, counts() - before);
    if (training.looks_at_steps) trained.steps.push_back(step);
    trained.losses.push_back(loss.item<double>());
  }
  trained.is_exact = training.is_exact;
  trained.skipped = mixed.skipped_steps();
  trained.scale = mixed.loss_scaler().scale();
  for (const at::Tensor& parameter : net->parameters())
    trained.parameters.push_back(parameter.detach().cpu().to(at::kFloat));
  return trained;
}

// The losses of the first training are those of the second within a relative error. So are the
// parameters, if the gradients' errors stay small in them.
inline void expect_same_training(const Trained& got, const Trained& want, double tolerance) {
  EXPECT_EQ(got.steps, want.steps);
  EXPECT_EQ(got.skipped, want.skipped);
  EXPECT_EQ(got.scale, want.scale);
  ASSERT_EQ(got.losses.size(), want.losses.size());
  EXPECT_TRUE(near(torch::tensor(got.losses, at::kDouble), torch::tensor(want.losses, at::kDouble),
                   tolerance));
  if (want.is_exact) {
    EXPECT_TRUE(near(got.parameters, want.parameters, tolerance));
  }
}

}  // namespace semitone::test::accelerator
