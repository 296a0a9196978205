// Checkpoints that a thread writes while the training continues.

#include "semitone/checkpoint.h"
#include "src/checkpoint/archive.h"
#include "src/checkpoint/entry.h"
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

// Saves steps 1 to 6, trains on meanwhile, and loads them again.
void expect_states_of_the_calls(const Setting& setting, bool in_background) {
  SCOPED_TRACE(testing::PrintToString(setting));
  const TemporaryFolder folder;
  Training run(setting);
  auto checkpoint =
      run.checkpoint(folder / "run", CheckpointOptions().copy_in_background(in_background));
  if (in_background) run.before_step = [&] { checkpoint.wait_for_copy(); };
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

TEST(SaveAsync, HasTheStateOfTheCallWhateverIsTrainedMeanwhile) {
  for (const char* const level : semitone::test::kLevels) {
    for (const char* const optimizer : kOptimizers) {
      for (const bool in_background : {false, true}) {
        SCOPED_TRACE(in_background ? "copied in background" : "copied at once");
        expect_states_of_the_calls(
            {.level = level, .dtype = torch::kBFloat16, .optimizer = optimizer}, in_background);
      }
    }
  }
}

struct ScaleAndShiftImpl : torch::nn::Module {
  ScaleAndShiftImpl()
      : scale(register_parameter("scale", torch::ones({1000}))),
        shift(register_buffer("shift", torch::zeros({1000}))) {}
  at::Tensor scale;
  at::Tensor shift;
};
TORCH_MODULE(ScaleAndShift);

TEST(SaveAsyncInBackground, CopiesAtOnceWhatIsNotAParameterOrAState) {
  const TemporaryFolder folder;
  ScaleAndShift model;
  at::Tensor other = torch::zeros({1000});
  Checkpoint checkpoint(folder / "run", CheckpointOptions().copy_in_background(true));
  checkpoint.add("model", model).add("other", other);
  for (std::int64_t step = 1; step <= 20; ++step) {
    checkpoint.save_async(step);
    model->shift.fill_(step);
    other.fill_(step);
    checkpoint.wait_for_copy();
    {
      const at::NoGradGuard no_grad;
      model->scale.fill_(step);
    }
    EXPECT_EQ(checkpoint.resume(), step);
    EXPECT_EQ(model->scale.sum().item<double>(), 1000.0);
    EXPECT_EQ(model->shift.sum().item<double>(), 0.0);
    EXPECT_EQ(other.sum().item<double>(), 0.0);
  }
}

TEST(SaveAsyncInBackground, DefersParametersOfModelsAndNoBuffers) {
  CopyBuffers buffers;
  ScaleAndShift model;
  const auto entry = model_entry("model", model, std::make_shared<MixedPrecisions>());
  FileRecord record;
  entry->save(record, [&](Archive& archive) {
    const Archive copy = archive.copied(buffers, CopyBuffers::When::later);
    {
      const at::NoGradGuard no_grad;
      model->scale.fill_(3);  // changes what has not been copied
    }
    model->shift.fill_(4);
    DeferredCopies(buffers.deferred()).run();
    std::string bytes;
    copy.write([&](const void* data, std::size_t size) {
      bytes.append(static_cast<const char*>(data), size);
      return size;
    });
    const auto script = Source(std::make_shared<const std::string>(bytes)).script();
    EXPECT_TRUE(at::equal(script.attr("scale").toTensor(), torch::full({1000}, 3.0)));
    EXPECT_TRUE(at::equal(script.attr("shift").toTensor(), torch::zeros({1000})));
  });
}

TEST(SaveAsyncInBackground, RefusesStatesThatChangeBeforeTheyAreCopied) {
  CopyBuffers buffers;
  const at::Tensor first = torch::ones({10});
  const at::Tensor second = torch::ones({10});
  buffers.copy_of(first, CopyBuffers::When::later);
  buffers.copy_of(second.view({2, 5}), CopyBuffers::When::later);
  DeferredCopies copies(buffers.deferred());
  second.narrow(0, 2, 3).add_(1);
  expect_error([&] { copies.run(); }, {"got a change of one of them", "call wait_for_copy()"});
  buffers.finish();
  EXPECT_EQ(first.storage().use_count(), 1);  // released
}

TEST(SaveAsyncInBackground, RefusesAStorageThatGrows) {
  CopyBuffers buffers;
  at::Tensor value = torch::ones({10});
  buffers.copy_of(value, CopyBuffers::When::later);
  DeferredCopies copies(buffers.deferred());
  value.resize_({100000});
  expect_error([&] { copies.run(); }, {"got a change of one of them"});
}

TEST(SaveAsyncInBackground, RefusesChangesAfterTheCopyUnlessTheProgramHasWaited) {
  for (const bool waits : {false, true}) {
    CopyBuffers buffers;
    at::Tensor value = torch::ones({10});
    const at::Tensor copy = buffers.copy_of(value, CopyBuffers::When::later);
    DeferredCopies copies(buffers.deferred());
    copies.run();
    copies.require_confirmed_if_changed();
    if (waits) copies.confirm();
    value.fill_(2);
    if (!waits) {
      copies.confirm();  // too late
      expect_error([&] { copies.require_confirmed_if_changed(); }, {"call wait_for_copy()"});
    } else {
      copies.require_confirmed_if_changed();
    }
    EXPECT_TRUE(at::equal(copy, torch::ones({10})));
  }
}

// In whichever order the tensor is found.
TEST(SaveAsyncInBackground, CopiesAtOnceWhatIsABufferOfAnotherModel) {
  for (const bool buffer_first : {false, true}) {
    const TemporaryFolder folder;
    ScaleAndShift model;
    ScaleAndShift other;
    other->register_buffer("of_model", model->scale);
    Checkpoint checkpoint(folder / "run", CheckpointOptions().copy_in_background(true));
    if (buffer_first) {
      checkpoint.add("other", other).add("model", model);
    } else {
      checkpoint.add("model", model).add("other", other);
    }
    checkpoint.save_async(1);
    {
      const at::NoGradGuard no_grad;
      model->scale.fill_(2);
    }
    EXPECT_EQ(checkpoint.resume(), 1);
    EXPECT_EQ(model->scale.sum().item<double>(), 1000.0);
  }
}

// Each of from_blob's tensors has a storage of its own.
TEST(SaveAsyncInBackground, CopiesAtOnceTheLargestOfStoragesAtOneAddress) {
  CopyBuffers buffers;
  const at::Tensor memory = torch::ones({10});
  const at::Tensor part = torch::from_blob(memory.data_ptr(), {4});
  const at::Tensor whole = torch::from_blob(memory.data_ptr(), {10});
  buffers.copy_of(part, CopyBuffers::When::later);
  buffers.copy_of(whole, CopyBuffers::When::later);
  const at::Tensor copy = buffers.copy_of(whole, CopyBuffers::When::now);
  buffers.copy_cpu_values();
  EXPECT_TRUE(at::equal(copy, torch::ones({10})));
  EXPECT_EQ(buffers.deferred().size(), 1U);  // the part's
}

TEST(SaveAsyncInBackground, IsNotDisturbedByOtherFilesOfTheSameModel) {
  for (const char* const level : semitone::test::kLevels) {
    for (const char* const optimizer : kOptimizers) {
      const Setting setting{.level = level, .dtype = torch::kBFloat16, .optimizer = optimizer};
      SCOPED_TRACE(testing::PrintToString(setting));
      const TemporaryFolder folder;
      Training run(setting);
      const auto options = CheckpointOptions().copy_in_background(true);
      auto rolling = run.checkpoint(folder / "rolling", options);
      auto best = run.checkpoint(folder / "best", options);
      run.before_step = [&] {
        rolling.wait_for_copy();
        best.wait_for_copy();
      };
      run.train_to(2);
      const auto state = run.state();
      rolling.save_async(2);
      best.save_async(2);
      run.mixed.save_model(run.net, (folder / "model.pt").string());
      run.train_to(3);
      for (Checkpoint* const one : {&rolling, &best}) {
        EXPECT_EQ(one->resume(), 2);
        EXPECT_TRUE(same_bits(run.state(), state));
      }
    }
  }
}

// An object that draws a random number when it is saved.
struct Draws {
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("number", torch::rand({}));
  }
  void load(torch::serialize::InputArchive&) {}
};

TEST(SaveAsync, SavesGeneratorsLastAsSaveDoes) {
  for (const bool is_async : {false, true}) {
    const TemporaryFolder folder;
    Draws draws;
    Checkpoint checkpoint(folder / "run");
    checkpoint.add("draws", draws);
    if (is_async) {
      checkpoint.save_async(1);
    } else {
      checkpoint.save(1);
    }
    const at::Tensor next = torch::rand({});
    checkpoint.resume();
    EXPECT_TRUE(at::equal(torch::rand({}), next)) << is_async;
  }
}

TEST(SaveAsyncInBackground, CopiesInferenceTensorsAtOnce) {
  const c10::InferenceMode inference;
  CopyBuffers buffers;
  const at::Tensor value = torch::ones({10});
  const at::Tensor copy = buffers.copy_of(value, CopyBuffers::When::later);
  buffers.copy_cpu_values();
  value.fill_(2);
  EXPECT_TRUE(buffers.deferred().empty());
  EXPECT_TRUE(at::equal(copy, torch::ones({10})));
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

TEST_F(SaveAsyncOfANumber, FailsAfterTheCopyWithoutAnErrorOfTheWaitForTheCopy) {
  auto checkpoint = make();
  checkpoint.wait_for_copy();  // of nothing
  block();
  checkpoint.save_async(1);
  checkpoint.wait_for_copy();
  checkpoint.wait_for_copy();
  EXPECT_THAT(message_of<FileError>([&] { checkpoint.wait(); }), HasSubstr("Not a directory"));
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

// Of all that is saved, also when one save follows another.
TEST(SaveAsync, TakesTheMemoryOfOneCopy) {
  for (const bool in_background : {false, true}) {
    SCOPED_TRACE(in_background);
    const TemporaryFolder folder;
    torch::nn::Linear model(torch::nn::LinearOptions(4096, 4096).bias(false));  // 64 MiB
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    model->weight.mutable_grad() = torch::ones_like(model->weight);
    optimizer.step();  // makes 64 MiB of momentum
    at::Tensor value = torch::ones({32 << 18});
    std::ofstream("/proc/self/clear_refs") << "5";  // earlier tests may have needed more
    Checkpoint checkpoint(folder / "run",
                          CheckpointOptions().keep(1).copy_in_background(in_background));
    checkpoint.add("model", model).add("optimizer", optimizer).add("value", value);
    const double before = peak_memory();
    checkpoint.save(1);
    EXPECT_LT(peak_memory() - before, 32);
    for (const std::int64_t step : {2, 3, 4}) {
      checkpoint.save_async(step);
      checkpoint.wait();
    }
    const double grown = peak_memory() - before;
    EXPECT_GT(grown, 150);  // so that the measure is one
    EXPECT_LT(grown, 160 * 1.1);
  }
}
#endif

}  // namespace
}  // namespace async
}  // namespace semitone::checkpoint::test
