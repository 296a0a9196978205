#pragma once

#include "semitone/zoo/image_set.h"

#include <filesystem>

namespace semitone::zoo {

/// Reads the training or the test set of MNIST, or of another data set in the same four files
/// (Fashion-MNIST, KMNIST, or your own). It may have any number of 28 x 28 images, with labels from
/// 0 to 9.
///
/// The files in the folder are train-images-idx3-ubyte and train-labels-idx1-ubyte, or t10k-… for
/// the test set. Names with a dot (train-images.idx3-ubyte) and with the suffix .gz are found too.
/// If several exist, the first in that order is read.
///
/// @return  images (N, 28, 28), with 10 classes without names
/// FileError as in read_idx, and if a file is missing, if images are not 28 x 28, if there are
/// none, if images and labels differ in number, or if a label is above 9 (the message names the
/// first such label).
ImageSet load_mnist(const std::filesystem::path& folder, Split split);

}  // namespace semitone::zoo
