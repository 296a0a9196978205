#include "semitone/amp/captured_step.h"

#include "semitone/optim/fused_optimizer.h"
#include "src/amp/step_graph.h"
#include "src/optim/fused_state.h"
#include "src/scaling/loss_scale_on_device.h"
#include "tests/accelerator/training.h"
#include "tests/optim/all_fused_optimizers.h"
#include "tests/support/recorded_events.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// Captured steps on a device that has Semitone's kernels and graphs, and whose memory the host
// cannot touch.
namespace semitone::test::accelerator {
namespace {

// All memory that training changes.
std::function<std::vector<at::Tensor>()>& memory() {
  static std::function<std::vector<at::Tensor>()> value;
  return value;
}

// A graph that calls the recorded work, as a device's would launch it. As there, a capture changes
// no memory.
struct CallingGraph : amp::StepGraph {
  void warm_up(const std::function<void()>& warm) override { warm(); }
  void capture(const std::function<void()>& captured) override {
    std::vector<std::pair<at::Tensor, at::Tensor>> before;
    for (const at::Tensor& tensor : memory()())
      before.emplace_back(tensor.variable_data(), tensor.detach().clone());
    captured();
    for (const auto& [tensor, value] : before) tensor.copy_(value);
    work = captured;
  }
  void replay() override { work(); }
  void reset() override { work = nullptr; }
  std::function<void()> work;
};

}  // namespace
}  // namespace semitone::test::accelerator

namespace semitone::amp {

// Replaces the library's function.
std::unique_ptr<StepGraph> make_step_graph(c10::Device /*device*/) {
  return std::make_unique<test::accelerator::CallingGraph>();
}

}  // namespace semitone::amp

namespace semitone::test::accelerator {
namespace {

struct AcceleratorKernels : AcceleratorTest {};

amp::Options dynamic(const std::string& level) {
  return amp::Options(level).dtype(at::kHalf).verbosity(0).loss_scale_options(
      amp::LossScaleOptions().init_scale(1024).growth_interval(3));
}

// A net that takes captured steps, or the same steps operator by operator.
struct Trainer {
  explicit Trainer(const Kind& kind, const amp::Options& options, bool captures_ = true)
      : captures(captures_),
        net(make_net(device())),
        optimizer(kind(net->parameters())),
        mixed(amp::initialize(net, *optimizer, options)),
        captured(mixed, *optimizer,
                 [this](const std::vector<at::Tensor>& batch) { return loss(batch); }) {
    memory() = [this] { return all_memory(); };
  }

  at::Tensor loss(const std::vector<at::Tensor>& batch) {
    return loss_of(mixed.forward(net, batch[0]), batch[0]) * batch[1];
  }

  // A blocking copy to the device.
  static std::vector<at::Tensor> batch_of(int number, bool overflows = false) {
    const float factor = overflows ? std::numeric_limits<float>::infinity() : 1.0F;
    return {input_of(number, device()), torch::full({}, factor, at::TensorOptions(device()))};
  }

  amp::CapturedStep::Result step(int number, bool overflows = false) {
    const std::vector<at::Tensor> batch = batch_of(number, overflows);
    if (captures) return captured.run(batch);
    optimizer->zero_grad();
    const at::Tensor value = loss(batch);
    mixed.scale_loss(value, *optimizer).backward();
    return {value.detach(), mixed.step(*optimizer)};
  }

  std::vector<at::Tensor> all_memory() {
    std::vector<at::Tensor> all = net->parameters();
    for (const at::Tensor& buffer : net->buffers()) all.push_back(buffer);
    for (const auto& group : optimizer->param_groups())
      for (const at::Tensor& parameter : group.params()) all.push_back(parameter);
    for (const auto& [key, state] : optimizer->state()) {
      const auto& fused = static_cast<const optim::FusedState&>(*state);
      for (const at::Tensor& tensor : fused.tensors)
        if (tensor.defined()) all.push_back(tensor);
      if (fused.master_low.defined()) all.push_back(fused.master_low);
    }
    return all;
  }

  bool captures;
  NormedNet net;
  std::unique_ptr<optim::FusedOptimizer> optimizer;
  amp::MixedPrecision mixed;
  amp::CapturedStep captured;
};

TEST_F(AcceleratorKernels, CapturedStepsReadNothing) {
  for (const Kind& kind : all_fused_optimizers()) {
    if (kind.splits_masters) continue;  // for bf16 only
    for (const std::string level : {"O1", "O2"}) {
      SCOPED_TRACE(kind.name + " " + level);
      Trainer trainer(kind, dynamic(level));
      std::vector<amp::StepResult> steps;
      for (int i = 0; i < 5; ++i) steps.push_back(trainer.step(i).step);
      EXPECT_TRUE(trainer.captured.is_captured());
      std::vector<std::vector<at::Tensor>> batches;
      for (int i = 5; i < 12; ++i) batches.push_back(Trainer::batch_of(i, i == 8));
      for (std::size_t i = 0; i < batches.size(); ++i) {
        const Counts before = counts();
        steps.push_back(trainer.captured.run(batches[i]).step);
        const Counts step = counts() - before;
        EXPECT_EQ(step.reads, 0);
        EXPECT_EQ(step.uploads, 0);
        EXPECT_EQ(step.unpinned_async_copies, 0);
        // For the step before, when this one has been launched.
        EXPECT_EQ(step.waits, 1);
        EXPECT_TRUE(steps[steps.size() - 2].is_known());
      }
      EXPECT_FALSE(steps.back().is_known());
      const auto reads = host_reads();
      EXPECT_EQ(trainer.mixed.skipped_steps(), 1);
      EXPECT_EQ(steps[8], amp::Step::skipped);
      EXPECT_EQ(steps[11], amp::Step::stepped);
      EXPECT_EQ(host_reads(), reads);
    }
  }
}

// The outcome of no step is looked at in between.
TEST_F(AcceleratorKernels, CapturedStepsAreThoseOfOperators) {
  for (const Kind& kind : all_fused_optimizers()) {
    if (kind.splits_masters) continue;
    for (const std::string level : {"O1", "O2"}) {
      SCOPED_TRACE(kind.name + " " + level);
      Trainer want(kind, dynamic(level), false);
      Trainer got(kind, dynamic(level));
      std::vector<at::Tensor> losses;
      std::vector<amp::StepResult> steps;
      const auto overflows = [](int i) { return i == 3 || i == 6 || i == 7 || i == 11; };
      for (int i = 0; i < 12; ++i) {
        const auto [loss, step] = got.step(i, overflows(i));
        losses.push_back(loss);
        steps.push_back(step);
      }
      EXPECT_TRUE(got.captured.is_captured());
      for (std::size_t i = 0; i < losses.size(); ++i) {
        SCOPED_TRACE("step " + std::to_string(i));
        const auto [loss, step] = want.step(static_cast<int>(i), overflows(static_cast<int>(i)));
        expect_bitwise_equal(losses[i].cpu(), loss.cpu());
        EXPECT_EQ(steps[i], step);
      }
      EXPECT_EQ(got.mixed.loss_scaler().state(), want.mixed.loss_scaler().state());
      EXPECT_EQ(got.mixed.skipped_steps(), 4);
      const auto all = got.all_memory();
      const auto expected = want.all_memory();
      ASSERT_EQ(all.size(), expected.size());
      for (std::size_t i = 0; i < got.net->parameters().size() + got.net->buffers().size(); ++i)
        expect_bitwise_equal(all[i].detach().cpu(), expected[i].detach().cpu());
      for (const auto& group : got.optimizer->param_groups())
        EXPECT_EQ(got.optimizer->steps_of(group.params()[0]), 8);
    }
  }
}

// A listener needs the name of the parameter that overflowed, before the next step overwrites its
// gradient.
TEST_F(AcceleratorKernels, CapturedStepsOfListenersReadAtOnce) {
  Trainer trainer(all_fused_optimizers()[0], dynamic("O2"));
  for (int i = 0; i < 5; ++i) trainer.step(i);
  trainer.mixed.skipped_steps();
  const RecordedEvents events;
  const auto before = host_reads();
  EXPECT_TRUE(trainer.step(5).step.is_known());
  EXPECT_EQ(host_reads(), before + 1);
  EXPECT_EQ(trainer.step(6, true).step, amp::Step::skipped);
  ASSERT_EQ(events.skips().size(), 1U);
  EXPECT_GT(events.skips()[0].non_finite, 0);
  EXPECT_NE(events.skips()[0].parameter, "");
  EXPECT_EQ(events.updates().size(), 2U);
}

TEST_F(AcceleratorKernels, LossScalesOfDevicesChangeThere) {
  const auto rule = amp::LossScaleOptions::deepspeed().growth_interval(2);
  amp::LossScaleOnDevice scale(rule, device());
  amp::detail::LossScaleState want = amp::detail::initial_loss_scale(rule);
  const Counts before = counts();
  scale.send(want);
  for (const float found_inf : {0.0F, 1.0F, 1.0F, 0.0F, 0.0F, 0.0F, 0.0F, 1.0F}) {
    scale.update(torch::full({1}, found_inf, at::TensorOptions(device())));
    want = amp::detail::next_loss_scale(rule, want, found_inf != 0);
  }
  const Counts used = counts() - before;
  EXPECT_EQ(used.reads + used.waits + used.uploads, 0);
  EXPECT_EQ(scale.read(), want);
  EXPECT_EQ(scale.scale().item<float>(), static_cast<float>(want.scale));
}

}  // namespace
}  // namespace semitone::test::accelerator
