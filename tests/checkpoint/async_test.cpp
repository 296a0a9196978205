// Checkpoints that a thread writes while the training continues.

#include "semitone/checkpoint.h"
#include "tests/checkpoint/training.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace semitone::checkpoint::test {
namespace async {
namespace {

namespace fs = std::filesystem;
using semitone::test::CapturedLog;
using semitone::test::expect_error;
using semitone::test::message_of;
using semitone::test::TemporaryFolder;
using semitone::test::write_text;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(SaveAsync, HasTheStateOfTheCallWhateverIsTrainedMeanwhile) {
  for (const char* const level : semitone::test::kLevels) {
    for (const char* const optimizer : kOptimizers) {
      const Setting setting{.level = level, .dtype = torch::kBFloat16, .optimizer = optimizer};
      SCOPED_TRACE(testing::PrintToString(setting));
      const TemporaryFolder folder;
      Training run(setting);
      auto checkpoint = run.checkpoint(folder / "run");
      std::vector<std::vector<at::Tensor>> states;
      for (std::int64_t step = 1; step <= 6; ++step) {
        run.train_to(step);
        states.push_back(run.state());
        checkpoint.save_async(step);
      }
      run.train_to(9);
      checkpoint.wait();
      EXPECT_THAT(checkpoint.steps(), ElementsAre(4, 5, 6));
      for (const std::int64_t step : {6, 5, 4}) {
        EXPECT_EQ(checkpoint.resume(), step);
        EXPECT_TRUE(same_bits(run.state(), states[static_cast<std::size_t>(step) - 1]));
        fs::remove_all(checkpoint.path_of(step));
      }
    }
  }
}

class SaveAsyncOfANumber : public testing::Test {
 protected:
  Checkpoint make() {
    Checkpoint made(folder_ / "run");
    made.add("value", value_);
    return made;
  }

  // Makes the directory unusable.
  void block() { write_text(folder_ / "run", "a file"); }
  void unblock() { fs::remove(folder_ / "run"); }

  TemporaryFolder folder_;
  std::int64_t value_ = 0;
};

TEST_F(SaveAsyncOfANumber, IsCompleteBeforeAStepIsResumed) {
  auto checkpoint = make();
  for (value_ = 1; value_ <= 5; ++value_) {
    const std::int64_t step = value_;
    checkpoint.save_async(step);
    value_ = 0;
    checkpoint.resume(step);
    EXPECT_EQ(value_, step);
  }
}

TEST_F(SaveAsyncOfANumber, ReportsAFailureAtTheNextCallAndOnlyThere) {
  auto checkpoint = make();
  block();
  checkpoint.save_async(1);
  EXPECT_THAT(message_of<FileError>([&] { checkpoint.wait(); }), HasSubstr("Not a directory"));
  checkpoint.wait();
  checkpoint.save_async(2);
  EXPECT_THAT(message_of<FileError>([&] { checkpoint.save(3); }), HasSubstr("Not a directory"));
  unblock();
  checkpoint.save(4);
  checkpoint.save_async(5);
  EXPECT_EQ(checkpoint.resume(), 5);
  EXPECT_THAT(checkpoint.steps(), ElementsAre(4, 5));
}

TEST_F(SaveAsyncOfANumber, RefusesWrongUseAtOnce) {
  auto checkpoint = make();
  expect_error([&] { checkpoint.save_async(-1); }, {"got -1"});
  Checkpoint empty(folder_ / "run");
  expect_error([&] { empty.save_async(1); }, {"call add()"});
}

TEST_F(SaveAsyncOfANumber, IsCompleteWhenTheObjectIsDestroyed) {
  {
    auto checkpoint = make();
    value_ = 7;
    checkpoint.save_async(1);
    value_ = 8;
  }
  auto checkpoint = make();
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_EQ(value_, 7);
}

TEST_F(SaveAsyncOfANumber, LogsAFailureIfTheObjectIsDestroyed) {
  const CapturedLog log;
  block();
  make().save_async(1);
  EXPECT_THAT(log.text(), HasSubstr("Not a directory"));
}

// Saves a TorchScript module of its own, as an object that the archive and the program share.
struct HasAScript {
  HasAScript() : script("Net") {
    script.register_parameter("weight", torch::ones({2}), /*is_buffer=*/false);
    script.register_attribute("steps", c10::ListType::ofTensors(),
                              c10::List<at::Tensor>({torch::zeros({3})}));
  }
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("script", c10::IValue(script._ivalue()));
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue value;
    archive.read("script", value);
    loaded = torch::jit::Module(value.toObject());
  }
  torch::jit::Module script;
  torch::jit::Module loaded;
};

TEST(SaveAsync, CopiesObjectsOfTheProgramAndLeavesThem) {
  const TemporaryFolder folder;
  HasAScript object;
  const at::Tensor weight = object.script.attr("weight").toTensor();
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("object", object);
  checkpoint.save_async(1);
  {
    const at::NoGradGuard no_grad;
    weight.fill_(2);
    object.script.attr("steps").toTensorVector()[0].fill_(3);
  }
  EXPECT_TRUE(object.script.attr("weight").toTensor().is_same(weight));
  checkpoint.resume();
  EXPECT_TRUE(at::equal(object.loaded.attr("weight").toTensor(), torch::ones({2})));
  EXPECT_TRUE(at::equal(object.loaded.attr("steps").toTensorVector()[0], torch::zeros({3})));
}

TEST(SaveAsync, UnderInferenceModeDoesNotDisturbLaterCalls) {
  const TemporaryFolder folder;
  at::Tensor value = torch::ones({4});
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("value", value);
  {
    const c10::InferenceMode inference;
    checkpoint.save_async(1);
  }
  value.fill_(2);
  checkpoint.save_async(2);
  value.fill_(3);
  EXPECT_EQ(checkpoint.resume(), 2);
  EXPECT_TRUE(at::equal(value, torch::full({4}, 2.0)));
}

#if !defined(__SANITIZE_THREAD__)  // which keeps several bytes for each one
// The peak resident memory of this process, in MiB.
double peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    double kib = 0;
    if (word == "VmHWM:" && status >> kib) return kib / 1024;
  }
  return std::nan("");
}

TEST(SaveAsync, TakesTheMemoryOfOneCopy) {
  const TemporaryFolder folder;
  at::Tensor value = torch::ones({64 << 18});  // 64 MiB
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("value", value);
  const double before = peak_memory();
  checkpoint.save(1);
  EXPECT_LT(peak_memory() - before, 32);
  checkpoint.save_async(2);
  checkpoint.wait();
  const double grown = peak_memory() - before;
  EXPECT_GT(grown, 60);  // so that the measure is one
  EXPECT_LT(grown, 96);
}
#endif

}  // namespace
}  // namespace async
}  // namespace semitone::checkpoint::test
