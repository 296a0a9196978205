#include "semitone/checkpoint/checkpoint.h"
#include "tests/accelerator/training.h"
#include "tests/checkpoint/device_training.h"
#include "tests/support/levels.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <ATen/Context.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

// Checkpoints of what is on a device. They are written from its memory, and loaded into it.
namespace semitone::test::accelerator {
namespace {

using checkpoint::Checkpoint;
using checkpoint::CheckpointOptions;
using checkpoint::test::copies_on_cpu;
using checkpoint::test::DeviceSetting;
using checkpoint::test::expect_resumed_as_undisturbed;
using checkpoint::test::expect_resumed_on;
using checkpoint::test::kOptimizers;
using checkpoint::test::make_optimizer;
using checkpoint::test::state_tensors_of;

struct AcceleratorResume : AcceleratorTest {};

DeviceSetting setting_on(c10::Device where, const std::string& level,
                         const std::string& optimizer) {
  return {.device = where, .move = &move, .level = level, .optimizer = optimizer};
}

// Not on the current device, which is the first.
TEST_F(AcceleratorResume, GoesOnBitForBit) {
  for (const char* const level : kLevels) {
    for (const char* const optimizer : kOptimizers)
      expect_resumed_as_undisturbed(setting_on(device(1), level, optimizer));
  }
}

TEST_F(AcceleratorResume, TakesCheckpointsOfTheCPUAndTheReverse) {
  for (const char* const level : kLevels) {
    for (const char* const optimizer : kOptimizers) {
      expect_resumed_on(at::kCPU, setting_on(device(), level, optimizer));
      expect_resumed_on(device(), setting_on(at::kCPU, level, optimizer));
      expect_resumed_on(device(1), setting_on(device(), level, optimizer));
    }
  }
}

void fill(torch::nn::Module& model, double value) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : model.parameters()) parameter.fill_(value);
}

TEST_F(AcceleratorResume, OnlyTensorsOfTheCPUAreCopiedInBackground) {
  const TemporaryFolder folder;
  ToyNet there, here;
  at::Tensor mean = torch::ones({3}, device());
  move(*there, device());
  Checkpoint run(folder / "run", CheckpointOptions().copy_in_background(true));
  run.add("there", there).add("here", here).add("mean", mean);
  const auto want_there = copies_on_cpu(there->parameters());
  const auto want_here = copies_on_cpu(here->parameters());
  run.save_async(1);
  fill(*there, 7);
  mean.fill_(7);
  run.wait_for_copy();
  fill(*here, 7);
  EXPECT_EQ(run.resume(), 1);  // an error if save_async had left a tensor of the device
  EXPECT_TRUE(same_bits(copies_on_cpu(there->parameters()), want_there));
  EXPECT_TRUE(same_bits(copies_on_cpu(here->parameters()), want_here));
  EXPECT_EQ(mean.device(), device());
  EXPECT_TRUE(same_bits(mean.cpu(), torch::ones({3})));
}

// A model of which each layer has a device.
struct Halves {
  explicit Halves(const std::string& kind) {
    move(*net->first, device(0));
    move(*net->second, device(1));
    optimizer = make_optimizer(kind, net->parameters());
  }
  void step(double gradient) {
    for (const at::Tensor& parameter : net->parameters())
      parameter.mutable_grad() = torch::full_like(parameter.detach(), gradient);
    optimizer->step();
  }
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all = net->parameters();
    for (const at::Tensor& tensor : state_tensors_of(*optimizer)) all.push_back(tensor);
    return all;
  }
  Checkpoint checkpoint(const TemporaryFolder& folder) {
    Checkpoint made(folder / "run");
    made.add("net", net).add("optimizer", *optimizer);
    return made;
  }
  ToyNet net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

TEST_F(AcceleratorResume, PutsEachTensorOnItsDevice) {
  for (const std::string kind : {"SGD", "AdamW", "FusedAdam"}) {
    SCOPED_TRACE(kind);
    const TemporaryFolder folder;
    Halves saved(kind), resumed(kind);
    saved.step(0.5);
    saved.checkpoint(folder).save(1);
    EXPECT_EQ(resumed.checkpoint(folder).resume(), 1);
    EXPECT_TRUE(same_bits(copies_on_cpu(resumed.tensors()), copies_on_cpu(saved.tensors())));
    const auto got = resumed.tensors(), want = saved.tensors();
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) EXPECT_EQ(got[i].device(), want[i].device());
    for (Halves* one : {&saved, &resumed}) one->step(-0.25);
    EXPECT_TRUE(same_bits(copies_on_cpu(resumed.tensors()), copies_on_cpu(saved.tensors())));
  }
}

// The pretend devices have the CPU's generator. That each device gets its own state back, only a
// CUDA device shows (tests/checkpoint/on_cuda_test.cpp).
TEST_F(AcceleratorResume, GeneratorsOfAllDevicesAreSaved) {
  const TemporaryFolder folder;
  Halves saved("SGD");
  Checkpoint run = saved.checkpoint(folder);
  run.save(1);
  torch::serialize::InputArchive archive;
  archive.load_from((run.path_of(1) / "random.rank0.pt").string());
  for (const std::string name : {"cpu", "accelerator.0", "accelerator.1"}) {
    at::Tensor state;
    ASSERT_TRUE(archive.try_read(name, state)) << name;
    EXPECT_TRUE(same_bits(state, at::globalContext().defaultGenerator(device()).get_state()));
  }
}

}  // namespace
}  // namespace semitone::test::accelerator
