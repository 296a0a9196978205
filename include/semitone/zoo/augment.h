#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>

namespace semitone::zoo {

/// Options of augment. The defaults are those of the usual training on CIFAR-10 (He et al. 2015).
struct AugmentOptions {
  /// Zeros that are added on each side of an image before an area of the original size is cropped at
  /// random, in pixels: torchvision's RandomCrop(size, padding). 0: no crop.
  TORCH_ARG(std::int64_t, padding) = 4;
  /// Probability that an image is mirrored left to right, as by torchvision's
  /// RandomHorizontalFlip(p). 0 for digits and letters.
  TORCH_ARG(double, flip_probability) = 0.5;
  /// Random seed.
  TORCH_ARG(std::uint64_t, seed) = 0;
};

/// Moves and mirrors each image of a batch at random: torchvision's RandomCrop with padding, then
/// RandomHorizontalFlip.
///
/// What happens to an image depends on the seed, the epoch and the image's number in its data set
/// only. It is the same in every batch size and order, on every rank and device, and after a resume.
/// LibTorch's random numbers are not used. A zero of the frame is the number 0, so augment comes
/// before the images are normalised, as in torchvision. All of it is done on the device of the
/// images, without a host read.
///
///     const at::Tensor images = zoo::augment(set.images.index_select(0, indices), indices, epoch);
///
/// @param images   (B, height, width) or (B, channels, height, width), of any dtype
/// @param indices  the images' numbers in the data set: int64, (B), on their device
/// @param epoch    0 or more
/// @return         a new tensor of the same sizes, dtype and device, contiguous
///
/// Error for images of other dimensions, for indices of another dtype, number or device, for a
/// negative epoch or padding, and for a flip_probability outside [0, 1].
at::Tensor augment(const at::Tensor& images, const at::Tensor& indices, std::int64_t epoch,
                   const AugmentOptions& options = {});

}  // namespace semitone::zoo
