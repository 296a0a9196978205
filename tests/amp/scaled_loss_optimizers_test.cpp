// ScaledLoss with several models, losses and optimizers.

#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "tests/amp/scaled_loss_fixture.h"
#include "tests/support/levels.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <string>

namespace semitone::amp::scaled_loss_test {
namespace {

using test::near;
using test::RecordedEvents;
using test::reduction_tolerance;

struct Gan {
  explicit Gan(const Options& opts)
      : g_optimizer(g->parameters(), torch::optim::SGDOptions(0.125).momentum(0.5)),
        d_optimizer(d->parameters(), torch::optim::SGDOptions(0.125).momentum(0.5)),
        mixed(initialize({g, d}, {g_optimizer, d_optimizer}, Options(opts).num_losses(3))) {}

  // Apex's DCGAN example: three losses, of which the generator's reaches the discriminator too.
  // @param broken  the loss whose gradients get an inf
  void iterate(int broken = -1, bool name_both = false) {
    const auto run = [&](const at::Tensor& loss, OptimizerRefs optimizers, std::int64_t id,
                         const at::Tensor& parameter) {
      auto scaled = mixed.scale_loss(loss, optimizers, ScaleLossOptions().loss_id(id));
      scaled.value().backward();
      if (id == broken) parameter.mutable_grad()[0] = kInf;
      scaled.finish();
    };
    d_optimizer.zero_grad();
    const auto fake = ones() * mixed.forward(g, ones());
    run(mixed.forward(d, ones()), {d_optimizer}, 0, d->b);
    run(-mixed.forward(d, fake.detach()), {d_optimizer}, 1, d->a);
    d_step = mixed.step(d_optimizer);
    g_optimizer.zero_grad();
    OptimizerRefs of_g{g_optimizer};
    if (name_both) of_g.emplace_back(d_optimizer);
    run(mixed.forward(d, fake), of_g, 2, g->b);
    g_step = mixed.step(g_optimizer);
  }

  Toy g{0};
  Toy d{2};
  torch::optim::SGD g_optimizer;
  torch::optim::SGD d_optimizer;
  MixedPrecision mixed;
  Step d_step = Step::stepped;
  Step g_step = Step::stepped;
};

Options gan_options(const std::string& level, ScalarType dtype) {
  return Options(level).dtype(dtype).verbosity(0).loss_scale("dynamic").loss_scale_options(
      LossScaleOptions().init_scale(128));
}

TEST(ScaledLoss, DcganTrainsScaledLossAtEveryLevelAsInFp32) {
  Gan reference(Options("O0").verbosity(0));
  for (int i = 0; i < 2; ++i) reference.iterate();
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Gan gan(gan_options(level, dtype));
      for (int i = 0; i < 2; ++i) gan.iterate();
      EXPECT_TRUE(near(gan.mixed.master_params(gan.g_optimizer), reference.g->parameters(),
                       reduction_tolerance(dtype, 4)));
      EXPECT_TRUE(near(gan.mixed.master_params(gan.d_optimizer), reference.d->parameters(),
                       reduction_tolerance(dtype, 4)));
    }
  }
}

TEST(ScaledLoss, AnOverflowConcernsTheOptimizersOfItsLossAndItsScaler) {
  for (const std::string level : kLevels) {
    for (const int broken : {0, 1, 2}) {
      SCOPED_TRACE(level + ", loss " + std::to_string(broken));
      Gan gan(gan_options(level, torch::kHalf));
      gan.iterate(broken);
      EXPECT_EQ(gan.d_step, broken == 2 ? Step::stepped : Step::skipped);
      EXPECT_EQ(gan.g_step, broken == 2 ? Step::skipped : Step::stepped);
      for (int id = 0; id < 3; ++id) {
        EXPECT_EQ(gan.mixed.loss_scaler(id).scale(), id == broken ? 64 : 128);
        EXPECT_EQ(gan.mixed.loss_scaler(id).skipped_steps(), id == broken ? 1 : 0);
      }
      EXPECT_EQ(gan.mixed.skipped_steps(), 1);
    }
  }
}

TEST(ScaledLoss, ALossThatNamesTwoOptimizersSkipsBothStepsOnce) {
  Gan gan(gan_options("O2", torch::kHalf));
  const RecordedEvents events;
  gan.iterate(2, /*name_both=*/true);
  EXPECT_EQ(gan.g_step, Step::skipped);
  EXPECT_EQ(gan.d_step, Step::stepped);  // it came before
  // Both with the scale that the gradients had, as skips of one iteration.
  ASSERT_EQ(events.skips().size(), 2U);
  for (const auto& skip : events.skips()) {
    EXPECT_EQ(skip.loss_scale, 128);
    EXPECT_EQ(skip.consecutive, 1);
  }
  EXPECT_EQ(gan.mixed.step(gan.d_optimizer), Step::skipped);
  EXPECT_EQ(gan.mixed.loss_scaler(2).scale(), 64);
  EXPECT_EQ(gan.mixed.loss_scaler(2).skipped_steps(), 2);
  EXPECT_EQ(gan.mixed.loss_scaler(2).consecutive_skips(), 1);
  gan.iterate();
  EXPECT_EQ(gan.d_step, Step::stepped);
  EXPECT_EQ(gan.g_step, Step::stepped);
}

TEST(ScaledLoss, AStepThatIsYetToBeSkippedIsInTheSavedState) {
  Gan gan(gan_options("O2", torch::kHalf));
  gan.iterate(2, /*name_both=*/true);
  torch::serialize::OutputArchive out;
  gan.mixed.save(out);
  std::ostringstream stream;
  out.save_to(stream);
  std::istringstream file(stream.str());
  torch::serialize::InputArchive in;
  in.load_from(file);
  Gan resumed(gan_options("O2", torch::kHalf));
  resumed.mixed.load(in);
  EXPECT_EQ(resumed.mixed.step(resumed.g_optimizer), Step::stepped);
  EXPECT_EQ(resumed.mixed.step(resumed.d_optimizer), Step::skipped);
  EXPECT_EQ(resumed.mixed.step(resumed.d_optimizer), Step::stepped);
}

TEST(ScaledLoss, ZeroGradForgetsAnOverflowWithTheGradientsThatItWasIn) {
  Gan gan(gan_options("O2", torch::kHalf));
  gan.iterate(2, /*name_both=*/true);
  gan.mixed.zero_grad(gan.d_optimizer);
  gan.iterate();
  EXPECT_EQ(gan.d_step, Step::stepped);

  Trained trained(dynamic_scale(options("O2")));
  trained.overflow(trained.model->a);
  trained.mixed.zero_grad(trained.optimizer);
  trained.backward();
  EXPECT_EQ(trained.mixed.step(trained.optimizer), Step::stepped);
}

TEST(ScaledLoss, OptimizersThatWereNotNamedGetTheirGradientsToo) {
  for (const std::string level : kLevels) {
    Gan gan(gan_options(level, torch::kHalf));
    Gan plain(Options("O0").verbosity(0));
    for (Gan* one : {&gan, &plain}) {
      one->mixed.scale_loss(one->mixed.forward(one->d, ones()), one->d_optimizer).backward();
      const auto fake = ones() * one->mixed.forward(one->g, ones());
      one->mixed
          .scale_loss(one->mixed.forward(one->d, fake), one->g_optimizer,
                      ScaleLossOptions().loss_id(2))
          .backward();
    }
    for (auto optimizer : {&Gan::d_optimizer, &Gan::g_optimizer}) {
      const auto got = gan.mixed.master_params(gan.*optimizer);
      const auto want = plain.mixed.master_params(plain.*optimizer);
      for (std::size_t i = 0; i < want.size(); ++i) {
        EXPECT_TRUE(test::near(got[i].grad(), want[i].grad(), reduction_tolerance(torch::kHalf, 4)))
            << level;
      }
    }
  }
}

}  // namespace
}  // namespace semitone::amp::scaled_loss_test
