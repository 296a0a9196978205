#pragma once

#include "semitone/zoo/image_set.h"

#include <cstdint>

namespace semitone::train {

// The images of a training and of its test.
struct DataSet {
  zoo::ImageSet train;
  zoo::ImageSet test;
};

// What a model has to know about the images that it classifies.
struct ImageShape {
  std::int64_t channels = 1;
  std::int64_t height = 28;
  std::int64_t width = 28;
  std::int64_t classes = 10;

  friend bool operator==(const ImageShape&, const ImageShape&) = default;
};

// The shape of a set with at least one image and a stated number of classes.
inline ImageShape shape_of(const zoo::ImageSet& set) {
  return {set.channels(), set.images.size(-2), set.images.size(-1), set.classes};
}

// Returns the data set with one test image, for trainings whose test result is not needed: a test
// takes as long as hundreds of steps.
inline DataSet with_one_test_image(const DataSet& data) {
  zoo::ImageSet one = data.test;
  one.images = one.images.narrow(0, 0, 1);
  one.labels = one.labels.narrow(0, 0, 1);
  return {data.train, one};
}

}  // namespace semitone::train
