#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>

namespace semitone::zoo {

/// Images and their labels.
struct ImageSet {
  at::Tensor images;  ///< uint8, (N, height, width)
  at::Tensor labels;  ///< int64, (N), from 0

  std::int64_t size() const { return images.defined() ? images.size(0) : 0; }
};

enum class Split { train, test };

/// Reads the training or the test set of MNIST, or of another data set in the same four files
/// (Fashion-MNIST, KMNIST, or your own). It may have any number of 28 x 28 images, with labels from
/// 0 to 9.
///
/// The files in the folder are train-images-idx3-ubyte and train-labels-idx1-ubyte, or t10k-… for
/// the test set. Names with a dot (train-images.idx3-ubyte) and with the suffix .gz are found too.
/// If several exist, the first in that order is read.
///
/// FileError as in read_idx, and if a file is missing, if images are not 28 x 28, if there are
/// none, if images and labels differ in number, or if a label is above 9 (the message names the
/// first such label).
ImageSet load_mnist(const std::filesystem::path& folder, Split split);

}  // namespace semitone::zoo
