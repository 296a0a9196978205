#include "semitone/optim/clip_grad.h"
#include "semitone/optim/fused_optimizer.h"
#include "src/optim/deferred_gradient.h"
#include "tests/accelerator/training.h"
#include "tests/optim/all_fused_optimizers.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

// Gradients that O2's step reads in 16 bits, on a device with Semitone's kernels whose memory the
// host cannot touch.
namespace semitone::test::accelerator::deferred_gradients_test {
namespace {

struct AcceleratorDeferredGradients : AcceleratorTest {};

// A loss by which the gradient of one 16-bit weight alone is infinite: those of weights that stay in
// fp32 are not deferred.
at::Tensor overflowing(const at::Tensor& loss, const NormedNet& net) {
  return loss + (net->second->bias.to(at::kFloat) * std::numeric_limits<float>::infinity()).sum();
}

// A model at O2 in bf16, whose gradients need no scale.
struct Trainer {
  explicit Trainer(const Kind& kind, c10::Device where = device())
      : net(make_net(where)),
        optimizer(kind(net->parameters())),
        mixed(amp::initialize(
            net, *optimizer, amp::Options("O2").dtype(at::kBFloat16).loss_scale(1).verbosity(0))) {}

  void backward(int number, bool overflows = false) {
    const at::Tensor input = input_of(number, net->first->weight.device());
    const at::Tensor loss = loss_of(mixed.forward(net, input), input);
    mixed.scale_loss(overflows ? overflowing(loss, net) : loss, *optimizer).backward();
  }
  // Masters, and parameters that are fp32 in the model.
  const std::vector<at::Tensor>& masters() const { return optimizer->param_groups()[0].params(); }
  std::int64_t placeholders() const {
    return std::count_if(masters().begin(), masters().end(), [](const at::Tensor& master) {
      return master.grad().defined() && optim::DeferredGradient::is_placeholder(master.grad());
    });
  }

  NormedNet net;
  std::unique_ptr<optim::FusedOptimizer> optimizer;
  amp::MixedPrecision mixed;
};

void expect_same_weights(const Trainer& got, const Trainer& want) {
  for (std::size_t i = 0; i < want.masters().size(); ++i)
    expect_bitwise_equal(got.masters()[i].detach().cpu(), want.masters()[i].detach().cpu());
  for (std::size_t i = 0; i < want.net->parameters().size(); ++i)
    expect_bitwise_equal(got.net->parameters()[i].detach().cpu(),
                         want.net->parameters()[i].detach().cpu());
}

std::vector<Kind> with_masters() {
  auto kinds = all_fused_optimizers();
  std::erase_if(kinds, [](const Kind& kind) { return kind.splits_masters; });
  return kinds;
}

// Of both linear layers and layer norm. Batch norm's weights stay in fp32.
constexpr std::int64_t kMasters = 5;

TEST_F(AcceleratorDeferredGradients, TrainAsMovedOnesDo) {
  for (const Kind& kind : with_masters()) {
    SCOPED_TRACE(kind.name);
    Trainer deferred(kind), moved(kind);
    for (int step = 0; step < 5; ++step) {
      for (Trainer* one : {&deferred, &moved}) {
        one->optimizer->zero_grad();
        const auto before = host_reads();
        one->backward(2 * step, step == 2);
        EXPECT_EQ(one->placeholders(), kMasters);
        if (step % 2 == 1) one->backward(2 * step + 1);  // accumulated
        if (one == &moved) {
          one->mixed.master_params(*one->optimizer);
          EXPECT_EQ(one->placeholders(), 0);
        }
        const amp::StepResult outcome = one->mixed.step(*one->optimizer);
        EXPECT_EQ(host_reads(), before);
        EXPECT_EQ(outcome, step == 2 ? amp::Step::skipped : amp::Step::stepped);
      }
      expect_same_weights(deferred, moved);
    }
    EXPECT_EQ(deferred.mixed.skipped_steps(), 1);
  }
}

TEST_F(AcceleratorDeferredGradients, TakeNoMemoryInTheMasters) {
  Trainer trainer(with_masters()[0]);
  trainer.backward(0);
  for (const at::Tensor& master : trainer.masters()) {
    if (!optim::DeferredGradient::is_placeholder(master.grad())) continue;
    EXPECT_EQ(master.grad().storage().nbytes(), sizeof(float));
    EXPECT_EQ(master.grad().sizes(), master.sizes());
    EXPECT_EQ(master.grad().device(), device());
    EXPECT_TRUE(master.grad().sum().isnan().item<bool>());
  }
}

TEST_F(AcceleratorDeferredGradients, AreClippedWithOneHostRead) {
  Trainer deferred(with_masters()[0]), moved(with_masters()[0]);
  deferred.backward(0);
  moved.backward(0);
  const auto before = host_reads();
  const double norm = deferred.mixed.clip_grad_norm_(*deferred.optimizer, 0.01);
  EXPECT_EQ(host_reads(), before + 1);
  EXPECT_EQ(deferred.placeholders(), kMasters);
  const double want = optim::clip_grad_norm_(moved.mixed.master_params(*moved.optimizer), 0.01);
  EXPECT_NEAR(norm, want, 1e-6 * want);
  EXPECT_GT(want, 0.01);
  deferred.mixed.step(*deferred.optimizer);
  moved.mixed.step(*moved.optimizer);
  for (std::size_t i = 0; i < moved.masters().size(); ++i)
    expect_close(deferred.masters()[i].detach().cpu(), moved.masters()[i].detach().cpu(), 1e-6);
}

TEST_F(AcceleratorDeferredGradients, GiveWayToZeros) {
  for (const bool to_none : {true, false}) {
    Trainer trainer(with_masters()[0]), untouched(with_masters()[0]);
    trainer.backward(0);
    trainer.optimizer->zero_grad(to_none);
    EXPECT_EQ(trainer.placeholders(), 0);
    trainer.mixed.step(*trainer.optimizer);
    const at::Tensor before = untouched.masters()[0].detach().cpu();
    expect_bitwise_equal(trainer.masters()[0].detach().cpu(),
                         to_none ? before : before.mul(1 - 0.01 * 0.1));  // weight decay alone
  }
}

TEST_F(AcceleratorDeferredGradients, AreNotSteppedPastTheirMasters) {
  Trainer trainer(with_masters()[0]), other(with_masters()[0]);
  trainer.backward(0);
  const auto before = host_reads();
  expect_error([&] { static_cast<torch::optim::Optimizer&>(*trainer.optimizer).step(); },
               {"MixedPrecision::step", "master_params"});
  EXPECT_EQ(host_reads(), before);
  other.backward(0);
  for (Trainer* one : {&trainer, &other}) one->mixed.step(*one->optimizer);
  expect_same_weights(trainer, other);
}

// A listener gets the gradients of the model, and the name of one that is not finite.
TEST_F(AcceleratorDeferredGradients, AreNamedIfTheyOverflow) {
  Trainer trainer(with_masters()[0]);
  const RecordedEvents events;
  trainer.backward(0);
  EXPECT_EQ(trainer.mixed.step(*trainer.optimizer), amp::Step::stepped);
  trainer.backward(1, true);
  EXPECT_EQ(trainer.mixed.step(*trainer.optimizer), amp::Step::skipped);
  ASSERT_EQ(events.skips().size(), 1U);
  EXPECT_EQ(events.skips()[0].parameter, "second.bias");
  ASSERT_EQ(events.gradients().size(), 2U);
  EXPECT_EQ(events.gradients()[0].gradients[0].scalar_type(), at::kBFloat16);
}

TEST_F(AcceleratorDeferredGradients, OfTwoDevicesAreCheckedOnEach) {
  for (const int bad : {-1, 0, 1}) {
    std::vector<NormedNet> nets;
    std::vector<at::Tensor> parameters;
    for (c10::DeviceIndex index = 0; index < kDevices; ++index) {
      nets.push_back(make_net(device(index)));
      for (const at::Tensor& parameter : nets.back()->parameters()) parameters.push_back(parameter);
    }
    const auto optimizer = with_masters()[0](parameters);
    auto mixed =
        amp::initialize({nets[0], nets[1]}, {*optimizer},
                        amp::Options("O2").dtype(at::kBFloat16).loss_scale(1).verbosity(0));
    at::Tensor loss;
    for (int i = 0; i < kDevices; ++i) {
      NormedNet net = nets[static_cast<std::size_t>(i)];
      const at::Tensor input = input_of(0, device(static_cast<c10::DeviceIndex>(i)));
      at::Tensor part = loss_of(mixed.forward(net, input), input);
      if (i == bad) part = overflowing(part, net);
      loss = loss.defined() ? loss + part.to(device()) : part;
    }
    const auto before = host_reads();
    mixed.scale_loss(loss, *optimizer).backward();
    EXPECT_EQ(host_reads(), before);
    EXPECT_EQ(mixed.step(*optimizer), bad < 0 ? amp::Step::stepped : amp::Step::skipped);
  }
}

}  // namespace
}  // namespace semitone::test::accelerator::deferred_gradients_test
