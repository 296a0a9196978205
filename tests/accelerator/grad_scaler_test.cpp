#include "semitone/scaling/grad_scaler.h"

#include "semitone/autocast/autocast.h"
#include "tests/accelerator/training.h"
#include "tests/support/tolerance.h"

#include <torch/optim.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace semitone::test::accelerator {
namespace {

struct AcceleratorGradScaler : AcceleratorTest {};

struct Scaled {
  std::vector<double> losses;
  std::vector<double> scales;
  std::vector<amp::Step> steps;
  std::vector<std::int64_t> reads;  // by unscale_, step and update
};

Scaled run(c10::Device device, bool unscale, int overflow_at) {
  auto net = make_net(device);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  amp::GradScaler scaler(amp::LossScaleOptions().init_scale(1024).growth_interval(2));
  Scaled result;
  for (int i = 0; i < 5; ++i) {
    const at::Tensor input = input_of(i, device);
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const amp::Autocast region(device.type(), at::kHalf);
      loss = loss_of(net->forward(input), input);
    }
    scaler.scale(i == overflow_at ? loss * std::numeric_limits<float>::infinity() : loss)
        .backward();
    const auto before = host_reads();
    if (unscale) scaler.unscale_(optimizer);
    result.steps.push_back(scaler.step(optimizer));
    scaler.update();
    result.reads.push_back(host_reads() - before);
    result.losses.push_back(loss.item<double>());
    result.scales.push_back(scaler.get_scale());
  }
  return result;
}

// Ranks may have gradients on different numbers of devices: each agrees once.
TEST_F(AcceleratorGradScaler, GradientsOfSeveralDevicesHaveOneFlag) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const std::vector<float>& gradients :
       {std::vector<float>{1, 1, 1}, {inf, 1, 1}, {1, inf, 1}, {1, 1, inf}}) {
    std::vector<at::Tensor> parameters;
    for (const c10::Device where : {c10::Device(at::kCPU), device(0), device(1)})
      parameters.push_back(torch::ones({1}, torch::device(where)).requires_grad_());
    torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(1));
    amp::GradScaler scaler(amp::LossScaleOptions().init_scale(2));
    std::vector<float> flags;
    scaler.set_found_inf_hook([&](at::Tensor& found_inf) {
      EXPECT_EQ(found_inf.device(), device(0));
      flags.push_back(found_inf.item<float>());
    });
    scaler.scale(torch::ones({1}));
    for (std::size_t i = 0; i < parameters.size(); ++i)
      parameters[i].mutable_grad() = torch::full_like(parameters[i], gradients[i]);
    const bool is_finite = gradients == std::vector<float>{1, 1, 1};
    const amp::Step step = scaler.step(optimizer);
    EXPECT_EQ(step == amp::Step::stepped, is_finite);
    EXPECT_EQ(flags, std::vector<float>{is_finite ? 0.0F : 1.0F});
    scaler.update();
  }
}

TEST_F(AcceleratorGradScaler, TrainsAsOnTheCPUAndReadsOnceAStep) {
  for (const bool unscale : {false, true}) {
    for (const int overflow_at : {-1, 2}) {
      const Scaled want = run(at::kCPU, unscale, overflow_at);
      const Scaled got = run(device(), unscale, overflow_at);
      EXPECT_EQ(got.scales, want.scales);
      EXPECT_EQ(got.steps, want.steps);
      EXPECT_TRUE(near(torch::tensor(got.losses, at::kDouble),
                       torch::tensor(want.losses, at::kDouble), rounding_tolerance(at::kHalf, 20)));
      EXPECT_EQ(got.reads, std::vector<std::int64_t>(5, 1));
    }
  }
}

TEST_F(AcceleratorGradScaler, ParametersOnTwoDevicesShareOneStep) {
  std::vector<at::Tensor> parameters;
  for (c10::DeviceIndex index = 0; index < kDevices; ++index)
    parameters.push_back(torch::ones({3}, device(index)).requires_grad_());
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(1));
  amp::GradScaler scaler(amp::LossScaleOptions().init_scale(4));
  const auto step = [&](double factor) {
    optimizer.zero_grad();
    for (const at::Tensor& parameter : parameters)
      scaler.scale((parameter * (parameter.get_device() == 1 ? factor : 1)).sum()).backward();
    const auto result = scaler.step(optimizer);
    scaler.update();
    return result;
  };
  EXPECT_EQ(step(1), amp::Step::stepped);
  for (const at::Tensor& parameter : parameters)
    expect_bitwise_equal(parameter.detach().cpu(), torch::zeros({3}));
  EXPECT_EQ(step(std::numeric_limits<double>::infinity()), amp::Step::skipped);
  for (const at::Tensor& parameter : parameters)
    expect_bitwise_equal(parameter.detach().cpu(), torch::zeros({3}));
}

}  // namespace
}  // namespace semitone::test::accelerator
