#pragma once

#include <cstddef>

// The places of arguments in the schemas of convolution operators.
namespace semitone::amp {

// Of all of them.
struct ConvolutionPlace {
  static constexpr std::size_t kInput = 0;
  static constexpr std::size_t kWeight = 1;
  static constexpr std::size_t kStride = 3;
  static constexpr std::size_t kPadding = 4;
};

// Of conv1d, conv2d and conv3d. `convolution` and `_convolution` have (transposed, output_padding)
// before the groups.
struct PlainConvolutionPlace : ConvolutionPlace {
  static constexpr std::size_t kDilation = 5;
  static constexpr std::size_t kGroups = 6;
  static constexpr std::size_t kTransposed = 6;
  static constexpr std::size_t kOutputPadding = 7;
  static constexpr std::size_t kGroupsAfterTransposed = 8;
};

// Of conv_transpose1d, 2d and 3d.
struct TransposedConvolutionPlace : ConvolutionPlace {
  static constexpr std::size_t kOutputPadding = 5;
  static constexpr std::size_t kDilation = 7;
};

}  // namespace semitone::amp
