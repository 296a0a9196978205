#include "semitone/scaling/loss_scaler.h"

#include "semitone/core/error.h"
#include "semitone/scaling/detail/loss_scale_state.h"
#include "tests/support/archive.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp::loss_scaler_test {
namespace {

using test::archived;
using test::message_of;
using test::RecordedEvents;
using test::saved;
using testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(LossScaler, ScaledLossIsAtLeastFp32) {
  const LossScaler scaler;
  using Shape = std::vector<std::int64_t>;
  const auto scaled_dtype = [&](c10::ScalarType dtype, const Shape& shape) {
    return scaler.scaled(torch::ones(shape, dtype)).scalar_type();
  };
  for (const auto& shape : {Shape{}, Shape{3}}) {
    EXPECT_EQ(scaled_dtype(torch::kHalf, shape), torch::kFloat);
    EXPECT_EQ(scaled_dtype(torch::kBFloat16, shape), torch::kFloat);
    EXPECT_EQ(scaled_dtype(torch::kFloat, shape), torch::kFloat);
    EXPECT_EQ(scaled_dtype(torch::kDouble, shape), torch::kDouble);
  }
  EXPECT_EQ(scaler.scaled(torch::full({}, 2, torch::kHalf)).item<float>(), 131072.0F);
}

TEST(LossScaler, ScaledLossHasAGradient) {
  const LossScaler scaler(LossScaleOptions::fixed(8));
  const auto weight = torch::ones({}, torch::requires_grad());
  scaler.scaled((3 * weight).to(torch::kHalf)).backward();
  EXPECT_EQ(weight.grad().item<float>(), 24);
}

TEST(LossScaler, RefusesLossesThatAreNotFloating) {
  const LossScaler scaler;
  EXPECT_THAT(message_of<Error>([&] { scaler.scaled(torch::ones({}, torch::kLong)); }),
              HasSubstr("expected a floating-point loss, got int64"));
  EXPECT_THROW(scaler.scaled(torch::ones({}, torch::kComplexFloat)), Error);
  EXPECT_THAT(message_of<Error>([&] { scaler.scaled(at::Tensor()); }),
              HasSubstr("an undefined tensor"));
}

TEST(LossScaler, InverseIsTakenInFp64) {
  const LossScaler scaler(LossScaleOptions::fixed(3).scale_dtype(torch::kDouble));
  EXPECT_EQ(scaler.inverse(), static_cast<float>(1.0 / 3.0));
}

TEST(LossScaler, UpdatesMoveTheScaleAndAreTold) {
  LossScaler scaler(LossScaleOptions().init_scale(8).growth_interval(2), /*loss_id=*/5);
  const RecordedEvents events;
  scaler.update(false);
  scaler.update(false);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 8);
  ASSERT_EQ(events.updates().size(), 3U);
  EXPECT_EQ(events.updates()[1].loss_id, 5);
  EXPECT_EQ(events.updates()[1].before, 8);
  EXPECT_EQ(events.updates()[1].after, 16);
  EXPECT_FALSE(events.updates()[1].found_inf);
  EXPECT_EQ(events.updates()[2].after, 8);
  EXPECT_TRUE(events.updates()[2].found_inf);
}

TEST(LossScaler, SkipsAreCountedAndTold) {
  LossScaler scaler(LossScaleOptions().init_scale(8));
  const RecordedEvents events;
  const auto skip = [&](const char* parameter) {
    scaler.note_skip({parameter, 2});
    scaler.update(true);
  };
  skip("a");
  skip("b");
  scaler.update(false);
  skip("c");
  EXPECT_EQ(scaler.skipped_steps(), 3);
  EXPECT_EQ(scaler.consecutive_skips(), 1);
  ASSERT_EQ(events.skips().size(), 3U);
  EXPECT_EQ(events.skips()[1].parameter, "b");
  EXPECT_EQ(events.skips()[1].non_finite, 2);
  EXPECT_EQ(events.skips()[1].consecutive, 2);
  EXPECT_EQ(events.skips()[1].total, 2);
  EXPECT_EQ(events.skips()[1].loss_scale, 4);
  EXPECT_EQ(events.skips()[2].consecutive, 1);
  EXPECT_EQ(events.skips()[2].total, 3);
}

TEST(LossScaler, NamesAreWantedByListenersAndAtTheStartOfARunThatMayEndIt) {
  LossScaler silent;
  EXPECT_FALSE(silent.wants_names());
  LossScaler limited(LossScaleOptions().max_consecutive_skips(3));
  EXPECT_TRUE(limited.wants_names());
  limited.update(true);
  EXPECT_FALSE(limited.wants_names());
  limited.update(false);
  EXPECT_TRUE(limited.wants_names());
  const RecordedEvents listening;
  EXPECT_TRUE(silent.wants_names());
}

TEST(LossScaler, StopsAfterTooManySkipsInARowAndNamesTheFirst) {
  LossScaler scaler(LossScaleOptions().init_scale(0x1p-20).max_consecutive_skips(3));
  const auto skip = [&](const char* parameter) {
    scaler.note_skip({parameter, 2});
    scaler.update(true);
  };
  // An earlier run, which has ended, is not named.
  skip("old.weight");
  skip("old.bias");
  scaler.update(false);
  skip("conv1.weight");
  skip("");
  const auto message = message_of<DivergedError>([&] { skip("fc.bias"); });
  EXPECT_THAT(message, HasSubstr("3 consecutive skipped steps"));
  EXPECT_THAT(message, HasSubstr("'conv1.weight'"));
  EXPECT_THAT(message, HasSubstr("in 2 gradients"));
  EXPECT_THAT(message, HasSubstr("5.960464477539063e-08"));  // 2^-24, not 0.000000
  // It stays usable: one more skip is still too many, and a good step ends the run.
  EXPECT_THROW(skip("x"), DivergedError);
  EXPECT_NO_THROW(scaler.update(false));
  EXPECT_NO_THROW(skip("x"));
}

TEST(LossScaler, AnOverflowInAStepThatAnotherLossSkippedIsNamedButNotCounted) {
  LossScaler scaler(LossScaleOptions().max_consecutive_skips(2), 1);
  scaler.note_overflow({"head.weight", 1});
  scaler.update(true);
  EXPECT_EQ(scaler.skipped_steps(), 0);
  EXPECT_EQ(scaler.consecutive_skips(), 1);
  scaler.note_skip({"later", 1});
  const auto message = message_of<DivergedError>([&] { scaler.update(true); });
  EXPECT_THAT(message, HasSubstr("for loss 1"));
  EXPECT_THAT(message, HasSubstr("'head.weight'"));
  EXPECT_EQ(scaler.skipped_steps(), 1);
}

TEST(LossScaler, ARunWithoutNamesDoesNotBorrowThatOfAnEarlierOne) {
  LossScaler scaler(LossScaleOptions().max_consecutive_skips(1));
  scaler.note_skip({"mine", 1});
  EXPECT_THROW(scaler.update(true), DivergedError);
  scaler.update(false);
  scaler.note_skip({});  // another rank's overflow
  const auto message = message_of<DivergedError>([&] { scaler.update(true); });
  EXPECT_THAT(message, testing::Not(HasSubstr("mine")));
  EXPECT_THAT(message, HasSubstr("another rank"));
}

TEST(LossScaler, ReportsAScaleThatIsSetOrLoaded) {
  auto archive = saved(LossScaler(LossScaleOptions().init_scale(32)));
  LossScaler scaler(LossScaleOptions().init_scale(8));
  const RecordedEvents heard;
  scaler.set_scale(16);
  scaler.load(archive);
  scaler.load(archive);  // no change
  ASSERT_EQ(heard.updates().size(), 2U);
  EXPECT_EQ(heard.updates()[0].before, 8);
  EXPECT_EQ(heard.updates()[0].after, 16);
  EXPECT_EQ(heard.updates()[1].before, 16);
  EXPECT_EQ(heard.updates()[1].after, 32);
  EXPECT_FALSE(heard.updates()[1].found_inf);
}

TEST(LossScaler, SetScaleRoundsAndChecks) {
  LossScaler scaler(LossScaleOptions().growth_interval(10));
  scaler.update(false);
  scaler.set_scale(0.1);
  EXPECT_EQ(scaler.scale(), static_cast<double>(0.1F));
  EXPECT_EQ(scaler.state().growth_tracker, 1);
  for (const double bad : {0.0, -1.0, kInf, std::nan(""), 1e39, 1e-60}) {
    EXPECT_THROW(scaler.set_scale(bad), Error) << bad;
  }
  EXPECT_THAT(message_of<Error>([&] { scaler.set_scale(1e39); }),
              HasSubstr("a finite scale above 0 in float32, got 1e+39"));
  EXPECT_EQ(scaler.scale(), static_cast<double>(0.1F));
}

TEST(LossScaler, BacksOffWithoutAnOverflow) {
  LossScaler scaler(LossScaleOptions()
                        .init_scale(16)
                        .backoff_factor(0.25)
                        .min_scale(3)
                        .growth_interval(10)
                        .growth_delay(2)
                        .hysteresis(3),
                    /*loss_id=*/5);
  for (int i = 0; i < 4; ++i) scaler.update(false);
  EXPECT_EQ(scaler.state().growth_tracker, 2);
  const RecordedEvents events;
  EXPECT_TRUE(scaler.back_off());
  EXPECT_EQ(scaler.scale(), 4);
  EXPECT_EQ(scaler.state().growth_tracker, -2);
  EXPECT_TRUE(scaler.back_off());
  EXPECT_EQ(scaler.scale(), 3);
  EXPECT_FALSE(scaler.back_off());
  scaler.set_scale(2);  // below the bound
  EXPECT_FALSE(scaler.back_off());
  EXPECT_EQ(scaler.scale(), 2);
  EXPECT_EQ(scaler.skipped_steps(), 0);
  ASSERT_EQ(events.updates().size(), 3U);
  EXPECT_EQ(events.updates()[0].loss_id, 5);
  EXPECT_EQ(events.updates()[0].before, 16);
  EXPECT_EQ(events.updates()[0].after, 4);
  EXPECT_FALSE(events.updates()[0].found_inf);
}

TEST(LossScaler, NeitherAConstantScaleNorTheSmallestNumberBacksOff) {
  LossScaler constant(LossScaleOptions::fixed(8));
  EXPECT_FALSE(constant.back_off());
  EXPECT_EQ(constant.scale(), 8);
  LossScaler smallest(LossScaleOptions::torch().init_scale(0x1p-149));
  EXPECT_FALSE(smallest.back_off());
  EXPECT_EQ(smallest.scale(), 0x1p-149);
}

TEST(LossScaler, NewOptionsKeepTheStateButNoCounterThatWouldNeverFireAgain) {
  LossScaler scaler(LossScaleOptions().init_scale(8).growth_interval(100));
  for (int i = 0; i < 50; ++i) scaler.update(false);
  scaler.set_options(LossScaleOptions().growth_interval(10));
  EXPECT_EQ(scaler.scale(), 8);
  EXPECT_EQ(scaler.state().growth_tracker, 9);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 16);
  EXPECT_THROW(scaler.set_options(LossScaleOptions().min_scale(8).max_scale(4)), Error);
  EXPECT_EQ(scaler.options().growth_interval(), 10);
}

TEST(LossScaler, NewOptionsShortenTheDelayThatWasLeft) {
  LossScaler scaler(LossScaleOptions().growth_delay(1000));
  scaler.update(false);
  scaler.set_options(LossScaleOptions().growth_delay(10));
  EXPECT_EQ(scaler.state().growth_tracker, -10);
  scaler.set_options(LossScaleOptions());
  EXPECT_EQ(scaler.state().growth_tracker, 0);
  auto archive = saved(scaler);
  LossScaler resumed;
  resumed.load(archive);
  EXPECT_EQ(resumed.state().growth_tracker, 0);
}

LossScaler a_used_one() {
  LossScaler scaler(LossScaleOptions()
                        .init_scale(1000)
                        .growth_factor(1.7)
                        .backoff_factor(0.3)
                        .growth_interval(7)
                        .growth_delay(2)
                        .min_scale(0.5)
                        .max_scale(1e6)
                        .hysteresis(3)
                        .overflow_count(OverflowCount::since_growth)
                        .max_consecutive_skips(50)
                        .scale_dtype(torch::kDouble));
  for (const bool found_inf : {false, true, true, true, false, true}) {
    if (found_inf) scaler.note_skip({"layer.weight", 4});
    scaler.update(found_inf);
  }
  return scaler;
}

TEST(LossScaler, SavesAndLoadsEverything) {
  const LossScaler scaler = a_used_one();
  auto archive = saved(scaler);
  LossScaler loaded;
  loaded.load(archive);
  EXPECT_EQ(loaded.state(), scaler.state());
  EXPECT_EQ(loaded.skipped_steps(), scaler.skipped_steps());
  EXPECT_EQ(loaded.consecutive_skips(), scaler.consecutive_skips());
  const LossScaleOptions& a = loaded.options();
  const LossScaleOptions& b = scaler.options();
  EXPECT_EQ(a.init_scale(), b.init_scale());
  EXPECT_EQ(a.growth_factor(), b.growth_factor());
  EXPECT_EQ(a.backoff_factor(), b.backoff_factor());
  EXPECT_EQ(a.growth_interval(), b.growth_interval());
  EXPECT_EQ(a.growth_delay(), b.growth_delay());
  EXPECT_EQ(a.min_scale(), b.min_scale());
  EXPECT_EQ(a.max_scale(), b.max_scale());
  EXPECT_EQ(a.hysteresis(), b.hysteresis());
  EXPECT_EQ(a.overflow_count(), b.overflow_count());
  EXPECT_EQ(a.dynamic(), b.dynamic());
  EXPECT_EQ(a.max_consecutive_skips(), b.max_consecutive_skips());
  EXPECT_EQ(a.scale_dtype(), b.scale_dtype());
}

TEST(LossScaler, TheNameOfTheFirstOverflowSurvivesAResume) {
  LossScaler scaler(LossScaleOptions().max_consecutive_skips(2));
  scaler.note_skip({"layer.weight", 1});
  scaler.update(true);
  auto archive = saved(scaler);
  LossScaler resumed;
  resumed.load(archive);
  resumed.note_skip({});
  EXPECT_THAT(message_of<DivergedError>([&] { resumed.update(true); }), HasSubstr("layer.weight"));
}

TEST(LossScaler, AScaleThatFellToZeroIsRestoredAsItWas) {
  LossScaler scaler(LossScaleOptions::torch().init_scale(1e-44));
  for (int i = 0; i < 10; ++i) scaler.update(true);
  ASSERT_EQ(scaler.scale(), 0);
  auto archive = saved(scaler);
  LossScaler loaded;
  loaded.load(archive);
  EXPECT_EQ(loaded.state(), scaler.state());
}

// An archive like a saved one, with some values replaced, or omitted (None).
torch::serialize::InputArchive altered(const std::map<std::string, c10::IValue>& changes) {
  const std::map<std::string, c10::IValue> sound{{"scale", 8.0},
                                                 {"growth_tracker", 1},
                                                 {"overflows", 0},
                                                 {"skipped", 0},
                                                 {"consecutive", 0},
                                                 {"first_parameter", std::string()},
                                                 {"first_parameters", 0},
                                                 {"init_scale", 8.0},
                                                 {"growth_factor", 2.0},
                                                 {"backoff_factor", 0.5},
                                                 {"growth_interval", 4},
                                                 {"growth_delay", 0},
                                                 {"min_scale", 1.0},
                                                 {"max_scale", 1024.0},
                                                 {"hysteresis", 1},
                                                 {"overflow_count", 1},
                                                 {"dynamic", true},
                                                 {"max_consecutive_skips", 0},
                                                 {"scale_dtype", std::string("float32")}};
  return archived([&](torch::serialize::OutputArchive& archive) {
    for (const auto& [key, value] : sound) {
      const auto change = changes.find(key);
      const c10::IValue& written = change == changes.end() ? value : change->second;
      if (!written.isNone()) archive.write(key, written);
    }
  });
}

TEST(LossScaler, LoadsASoundArchive) {
  LossScaler scaler;
  auto archive = altered({});
  scaler.load(archive);
  EXPECT_EQ(scaler.state(), (detail::LossScaleState{8, 1, 0}));
}

TEST(LossScaler, LoadRefusesWhatIsMissingOrNonsenseAndChangesNothing) {
  const std::vector<std::pair<std::string, c10::IValue>> bad{
      {"scale", {}},
      {"scale", -1.0},
      {"scale", std::nan("")},
      {"scale", std::string("big")},
      {"scale", torch::ones({})},
      {"growth_tracker", {}},
      {"growth_tracker", -1},
      {"growth_tracker", 1.5},
      {"overflows", -1},
      {"skipped", -1},
      {"consecutive", -7},
      {"first_parameter", 3},
      {"first_parameters", {}},
      {"init_scale", 0.0},
      {"growth_factor", 0.5},
      {"backoff_factor", 2.0},
      {"growth_interval", -2},
      {"growth_delay", -1},
      {"min_scale", 4096.0},  // above max_scale
      {"max_scale", 0.0},
      {"hysteresis", 0},
      {"overflow_count", 3},
      {"overflow_count", -1},
      {"dynamic", 1},
      {"max_consecutive_skips", -1},
      {"scale_dtype", std::string("float16")},
      {"scale_dtype", std::string("int64")},
  };
  for (const auto& [key, value] : bad) {
    LossScaler scaler = a_used_one();
    const auto before = scaler.state();
    auto archive = altered({{key, value}});
    EXPECT_THAT(message_of<FileError>([&] { scaler.load(archive); }),
                HasSubstr("[amp.loss_scaler.load]"))
        << key << " = " << value;
    EXPECT_EQ(scaler.state(), before) << key;
    EXPECT_EQ(scaler.options().growth_factor(), 1.7) << key;
  }
}

TEST(LossScaler, LoadSaysWhichKeyIsWrong) {
  LossScaler scaler;
  auto missing = altered({{"overflows", {}}});
  EXPECT_THAT(message_of<FileError>([&] { scaler.load(missing); }),
              HasSubstr("expected 'overflows' in the archive, got none"));
  auto mistyped = altered({{"scale", 8}});
  EXPECT_THAT(message_of<FileError>([&] { scaler.load(mistyped); }),
              HasSubstr("expected a real for 'scale', got Int"));
}

TEST(LossScaler, LoadedCountersAreFittedToTheirLimits) {
  LossScaler scaler;
  auto growth = altered({{"growth_tracker", 100}});
  scaler.load(growth);
  EXPECT_EQ(scaler.state().growth_tracker, 3);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 16);

  auto overflows = altered({{"overflows", 100}, {"hysteresis", 2}, {"overflow_count", 0}});
  scaler.load(overflows);
  EXPECT_EQ(scaler.state().overflows, 1);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 4);
}

}  // namespace
}  // namespace semitone::amp::loss_scaler_test
