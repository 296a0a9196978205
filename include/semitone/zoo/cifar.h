#pragma once

#include "semitone/zoo/image_set.h"

#include <cstdint>
#include <filesystem>

namespace semitone::zoo {

/// Reads the training or the test set of CIFAR-10 (Krizhevsky 2009) in its binary format, or of
/// another data set in the same files.
///
/// The files are data_batch_1.bin to data_batch_5.bin, or test_batch.bin, in the folder or in its
/// sub-folder cifar-10-batches-bin, which the original archive has. An image is a byte with its
/// label, from 0 to 9, and 3072 bytes: 32 x 32 red values, row by row, then the green and the blue
/// ones. A file may have any number of images. It may be gzipped, which is detected from its
/// content; the suffix .gz is found too. A file batches.meta.txt with ten lines gives the names of
/// the classes.
///
/// @param max_bytes  largest size of the unpacked files together; larger data are an error. The
///                   function allocates memory as the data arrive.
/// @return           images (N, 3, 32, 32), in the order of the files, with 10 classes
/// FileError with the path, what was expected and what was found: for a folder or a file that is
/// missing, unreadable or empty, for a file that ends within an image, for a label above 9 (the
/// message names the image), for corrupt or truncated gzip, and for a batches.meta.txt that has
/// another number of names.
ImageSet load_cifar10(const std::filesystem::path& folder, Split split,
                      std::int64_t max_bytes = std::int64_t{1} << 33);

/// The labels of CIFAR-100: 100 fine classes, or the 20 coarse ones ("superclasses").
enum class Cifar100Labels { fine, coarse };

/// Reads the training or the test set of CIFAR-100 in its binary format: train.bin or test.bin, in
/// the folder or in its sub-folder cifar-100-binary. An image begins with two bytes, the coarse
/// label from 0 to 19 and the fine label from 0 to 99. The names of the classes are in
/// fine_label_names.txt or coarse_label_names.txt, if there is such a file.
///
/// Everything else is as in load_cifar10. Both labels are checked, whichever is returned.
ImageSet load_cifar100(const std::filesystem::path& folder, Split split,
                       Cifar100Labels labels = Cifar100Labels::fine,
                       std::int64_t max_bytes = std::int64_t{1} << 33);

}  // namespace semitone::zoo
