#pragma once

#include "semitone/checkpoint/checkpoint.h"
#include "src/train/images.h"
#include "src/train/trainer.h"
#include "tests/support/image_files.h"
#include "tests/support/toy_nets.h"

#include <cstdint>
#include <filesystem>
#include <vector>

// A small training that learns in two epochs of 80 steps.
namespace semitone::train {

inline Classifier drop_net() {
  return test::DropNet();
}

inline const DataSet& data() {
  static const DataSet data =
      image_data(test::made_up_images(640, 1), test::made_up_images(200, 2));
  return data;
}

inline TrainOptions options_for(amp::OptLevel level, c10::ScalarType dtype) {
  return TrainOptions().opt_level(level).dtype(dtype).batch_size(8).epochs(2).lr(0.05);
}

// The steps of the checkpoints in a directory, and the directory of one step.
inline std::vector<std::int64_t> steps_in(const std::filesystem::path& directory) {
  return checkpoint::Checkpoint(directory).steps();
}

inline std::filesystem::path step_of(const std::filesystem::path& directory, std::int64_t step) {
  return checkpoint::Checkpoint(directory).path_of(step);
}

// Every event.
struct Recorder : Observer {
  using Observer::on;
  void on(const Resumed& event) override { resumed.push_back(event); }
  void on(const StepDone& step) override {
    steps.push_back(step);
    losses.push_back(step.loss);
  }
  void on(const LossSpike& spike) override { spikes.push_back(spike); }
  void on(const RolledBack& rolled_back) override { rollbacks.push_back(rolled_back); }
  void on(const EpochDone& epoch) override { epochs.push_back(epoch); }
  void on(const Tested& tested) override { tests.push_back(tested); }
  std::vector<Resumed> resumed;
  std::vector<StepDone> steps;
  std::vector<double> losses;
  std::vector<LossSpike> spikes;
  std::vector<RolledBack> rollbacks;
  std::vector<EpochDone> epochs;
  std::vector<Tested> tests;
};

}  // namespace semitone::train
