#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>

namespace semitone::zoo {

/// Images and what they show.
struct ImageSet {
  at::Tensor images;  ///< uint8, (N, height, width)
  at::Tensor labels;  ///< int64, (N), from 0

  std::int64_t size() const { return images.defined() ? images.size(0) : 0; }
};

enum class Split { train, test };

/// Reads one half of MNIST, or of any data set that comes in its four files: images of 28 x 28, any
/// number of them, and labels from 0 to 9 (Fashion-MNIST, KMNIST, one's own).
///
/// The files of a folder are train-images-idx3-ubyte and train-labels-idx1-ubyte, t10k-… for the
/// test half; names with a dot (train-images.idx3-ubyte) and with .gz at the end are found too.
/// Where several are there, the first of that list is taken.
///
/// FileError: see read_idx; a file is missing, images are not 28 x 28, there are none, images and
/// labels differ in number, a label is above 9 (the first such one is named).
ImageSet load_mnist(const std::filesystem::path& folder, Split split);

}  // namespace semitone::zoo
