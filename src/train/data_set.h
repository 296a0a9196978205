#pragma once

#include "semitone/zoo/mnist.h"

namespace semitone::train {

// The images of a training and of its test.
struct DataSet {
  zoo::ImageSet train;
  zoo::ImageSet test;
};

// Returns the data set with one test image, for trainings whose test result is not needed: a test
// takes as long as hundreds of steps.
inline DataSet with_one_test_image(const DataSet& data) {
  return {data.train, {data.test.images.narrow(0, 0, 1), data.test.labels.narrow(0, 0, 1)}};
}

}  // namespace semitone::train
