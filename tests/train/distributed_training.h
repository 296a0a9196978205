#pragma once

#include "semitone/comm/group.h"
#include "src/train/images.h"
#include "src/train/trainer.h"
#include "tests/support/image_files.h"
#include "tests/support/toy_nets.h"

#include <vector>

// Small trainings of several processes.
namespace semitone::train::distributed {

// Passes each model that it creates to the test.
class Models {
 public:
  explicit Models(double dropout) : dropout_(dropout) {}
  ModelFactory factory() {
    return [this] {
      last = test::DropNet(dropout_);
      return Classifier(last);
    };
  }
  test::DropNet last{nullptr};

 private:
  double dropout_;
};

// 201 test images: no multiple of the ranks.
inline const DataSet& data() {
  static const DataSet data =
      image_data(test::made_up_images(640, 1), test::made_up_images(201, 2));
  return data;
}

struct Losses : Observer {
  using Observer::on;
  void on(const StepDone& step) override { values.push_back(step.loss); }
  void on(const EpochDone& epoch) override { epochs.push_back(epoch); }
  std::vector<double> values;
  std::vector<EpochDone> epochs;
};

inline TrainOptions options_for(amp::OptLevel level, const comm::Group& group) {
  return TrainOptions().opt_level(level).batch_size(8).lr(0.05).group(group);
}

}  // namespace semitone::train::distributed
