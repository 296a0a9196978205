#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace semitone::zoo {

/// Images, their labels and their classes.
struct ImageSet {
  at::Tensor images;  ///< uint8, (N, height, width) or (N, channels, height, width)
  at::Tensor labels;  ///< int64, (N), from 0 to classes - 1
  /// Number of classes, which is not smaller because a class has no image. 0: not stated.
  std::int64_t classes = 0;
  /// The name of each class, in the order of the labels. Empty: the data have no names.
  std::vector<std::string> class_names{};

  std::int64_t size() const { return images.defined() ? images.size(0) : 0; }
  /// 1 for images without a dimension of channels. The set must have images.
  std::int64_t channels() const { return images.dim() == 4 ? images.size(1) : 1; }
};

enum class Split { train, test };

}  // namespace semitone::zoo
