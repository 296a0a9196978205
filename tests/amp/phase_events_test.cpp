// The parts of a step as listeners hear them (events::PhaseBegan, PhaseEnded).

#include "semitone/amp/accumulate.h"
#include "semitone/amp/initialize.h"
#include "semitone/optim/fused_sgd.h"
#include "tests/amp/scaled_loss_fixture.h"
#include "tests/support/recorded_events.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace semitone::amp::scaled_loss_test {
namespace {

using test::RecordedEvents;

std::string phases_of_step(const Options& opts, bool overflows = false) {
  Trained trained(opts);
  const at::Tensor loss = trained.loss();
  const RecordedEvents events;
  if (overflows) {
    auto scaled = trained.mixed.scale_loss(loss, trained.optimizer);
    scaled.value().backward();
    trained.model->b.mutable_grad()[0] = kInf;
    scaled.finish();
  } else {
    trained.mixed.scale_loss(loss, trained.optimizer).backward();
  }
  trained.mixed.step(trained.optimizer);
  return events.phases();
}

TEST(PhaseEvents, AStepIsInTheseParts) {
  // Without masters, nothing moves gradients before the step.
  EXPECT_EQ(phases_of_step(options("O0")), "backward() optimizer() unscale() optimizer()");
  EXPECT_EQ(phases_of_step(options("O1").loss_scale(128.0)),
            "backward() unscale() optimizer() unscale() optimizer()");
  EXPECT_EQ(phases_of_step(options("O2").loss_scale(128.0)),
            "backward() unscale() optimizer(unscale()) unscale() optimizer(optimizer())");
}

TEST(PhaseEvents, ASkippedStepHasNoUpdate) {
  EXPECT_EQ(phases_of_step(options("O2").loss_scale(128.0), /*overflows=*/true),
            "unscale() optimizer(unscale()) unscale()");
}

TEST(PhaseEvents, WithoutMixedPrecisionThereAreTwoParts) {
  EXPECT_EQ(phases_of_step(options("O2").enabled(false)), "backward() optimizer()");
}

TEST(PhaseEvents, TheHookForOtherRanksIsCommunication) {
  Trained trained(options("O1").loss_scale(128.0));
  trained.mixed.set_found_inf_hook([](at::Tensor&) {});
  trained.backward();
  const RecordedEvents events;
  trained.mixed.step(trained.optimizer);
  EXPECT_EQ(events.phases(), "optimizer() unscale(communication()) optimizer()");
}

TEST(PhaseEvents, ModelsThatRunThroughForwardAreForward) {
  Trained trained(options("O2").loss_scale(128.0));
  const RecordedEvents events;
  trained.loss();
  EXPECT_EQ(events.phases(), "forward()");
}

TEST(PhaseEvents, AccumulationIsForwardAndBackwardForEachMicroBatch) {
  Trained trained(options("O1").loss_scale(128.0));
  const RecordedEvents events;
  accumulate(trained.mixed, trained.optimizer, 2, [&](std::int64_t) { return trained.loss(); });
  EXPECT_EQ(events.phases(),
            "forward(forward()) backward() unscale() forward(forward()) backward() unscale()");
}

TEST(PhaseEvents, ABackwardPassThatThrowsEndsItsPart) {
  Trained trained(options("O1").loss_scale(128.0));
  const at::Tensor loss = trained.loss();
  trained.model->a.register_hook(
      [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("hook"); });
  const RecordedEvents events;
  EXPECT_THROW(trained.mixed.scale_loss(loss, trained.optimizer).backward(), std::runtime_error);
  EXPECT_EQ(events.phases(), "backward()");
}

TEST(PhaseEvents, AStepOfAFusedOptimizerIsOne) {
  const at::Tensor weight = torch::ones({4}, torch::requires_grad());
  weight.mutable_grad() = torch::ones({4});
  optim::FusedSGD optimizer({weight}, optim::FusedSGDOptions(0.1));
  const RecordedEvents events;
  optimizer.step();
  EXPECT_EQ(events.phases(), "optimizer()");
}

}  // namespace
}  // namespace semitone::amp::scaled_loss_test
