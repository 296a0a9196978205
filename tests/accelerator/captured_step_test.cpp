#include "semitone/amp/captured_step.h"

#include "semitone/optim/fused_adam.h"
#include "src/amp/step_graph.h"
#include "src/kernels/update_on_device.h"
#include "tests/accelerator/training.h"
#include "tests/support/errors.h"
#include "tests/support/tolerance.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

// A graph that calls the recorded work, as a device's would launch it.
struct CallingGraph : StepGraph {
  void warm_up(const std::function<void()>& warm) override { warm(); }
  void capture(const std::function<void()>& captured) override {
    captured();
    work = captured;
  }
  void replay() override { work(); }
  void reset() override { work = nullptr; }
  std::function<void()> work;
};

}  // namespace

// Replaces the library's function: the device has graphs.
std::unique_ptr<StepGraph> make_step_graph(c10::Device /*device*/) {
  return std::make_unique<CallingGraph>();
}

}  // namespace semitone::amp

namespace semitone::test::accelerator {
namespace {

struct AcceleratorCapturedStep : AcceleratorTest {
  static Trained run(c10::Device where, bool captured) {
    auto net = make_net(where);
    optim::FusedAdam optimizer(net->parameters(), optim::FusedAdamOptions(0.01));
    const auto options = amp::Options("O2").dtype(at::kHalf).loss_scale(128.0).verbosity(0);
    auto mixed = amp::initialize(net, optimizer, options);
    amp::CapturedStep step(mixed, optimizer, [&](const std::vector<at::Tensor>& batch) {
      return loss_of(mixed.forward(net, batch[0]), batch[0]);
    });
    Trained trained;
    for (int i = 0; i < 6; ++i) {
      const at::Tensor input = input_of(i, where);
      const Counts before = counts();
      const auto result = step.run({input});
      add(trained.step, counts() - before);
      trained.losses.push_back(result.loss.item<double>());
      trained.steps.push_back(result.step);
    }
    EXPECT_EQ(step.is_captured(), captured);
    trained.skipped = mixed.skipped_steps();
    trained.scale = mixed.loss_scaler().scale();
    return trained;
  }
};

// A graph would repeat the references with the rules of the capture.
TEST_F(AcceleratorCapturedStep, CapturedUpdatesNeedKernels) {
  kernels::UpdateOnDevice update(device());
  update.send(std::vector<kernels::SgdRule>(1));
  const auto values = torch::ones({4}, device());
  const std::vector<kernels::Update> items{
      {.param = values, .low = {}, .grad = values.clone(), .copy = {}, .state = {}}};
  expect_error([&] { update.require_capturable(items); }, {"kernels", "accelerator:0"});
}

// A device with graphs, but without the kernels that read learning rates from its memory, as a GPU
// that is too old for them.
TEST_F(AcceleratorCapturedStep, DevicesWithoutKernelsRunOperatorByOperator) {
  const auto make = [](std::vector<at::Tensor> parameters) {
    return std::make_unique<optim::FusedAdam>(std::move(parameters), optim::FusedAdamOptions(0.01));
  };
  const auto options = amp::Options("O2").dtype(at::kHalf).loss_scale(128.0);
  const Trained got = run(device(), false);
  const Trained want = train({.options = options, .make = make, .steps = 6, .is_exact = false});
  expect_same_training(got, want, rounding_tolerance(at::kHalf, 20));
  EXPECT_EQ(got.step.reads, 0);
  EXPECT_EQ(got.step.waits, 0);
}

}  // namespace
}  // namespace semitone::test::accelerator
