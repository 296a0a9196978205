#pragma once

#include "semitone/zoo/image_set.h"
#include "src/train/data_set.h"

#include <cstdint>

// Images as the data of a training.
namespace semitone::train {

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

// A batch has images in fp32, (B, channels, height, width), from 0 to 1, and a label for each.
//
// Error unless both sets have uint8 images of one size, and a label for each.
DataSet image_data(const zoo::ImageSet& train, const zoo::ImageSet& test);

}  // namespace semitone::train
