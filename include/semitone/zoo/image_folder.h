#pragma once

#include "semitone/zoo/image_set.h"

#include <torch/arg.h>

#include <cstdint>
#include <filesystem>
#include <optional>

namespace semitone::zoo {

/// Options of load_image_folder.
struct ImageFolderOptions {
  /// Height and width to which images are brought: scaled so that the shorter side has this size,
  /// with antialiasing, and cut at both ends of the longer one. These are torchvision's
  /// Resize(size) and CenterCrop(size). Default: images stay as they are and must have one size.
  TORCH_ARG(std::optional<std::int64_t>, size);
  /// Share of each class's images that is held out for the test, above 0 and below 1, if the folder
  /// has no splits of its own. A class with at least two images has at least one in both splits,
  /// and a single image is for training.
  TORCH_ARG(double, test_share) = 0.2;
  /// Random seed of the choice of these images, which otherwise depends on their names only.
  TORCH_ARG(std::uint64_t, seed) = 0;
  /// Largest size of the images of a split in memory. It is checked before they are allocated.
  TORCH_ARG(std::int64_t, max_bytes) = std::int64_t{1} << 33;
};

/// Reads the images of a folder with a sub-folder for each class, as torchvision's ImageFolder
/// does. Classes are numbered in the order of their names' bytes.
///
/// If there is a sub-folder train, then train and test, or train and val, are the two splits, each
/// with the same sub-folders for classes. Other names of splits, such as Training and Testing, are
/// an error. Otherwise the sub-folders are the classes themselves, and
/// test_share of the images is held out for Split::test; the same options give the same choice on
/// every machine.
///
/// Images are PNG, JPEG, and binary PPM and PGM files, with the suffixes .png, .jpg, .jpeg, .jpe,
/// .jfif, .ppm, .pgm and .pnm, also in capitals. Other images must be converted: files with the suffix of another usual
/// format are an error. Files without such a suffix, and those whose names begin with a dot, are
/// ignored. Sub-folders of a class belong to it. Symbolic links are followed. All images of a split
/// are read into memory, by all of LibTorch's threads, ordered by class and then by path.
///
/// Pixels equal those that torchvision reads through PIL, except in 16-bit grey images: they keep
/// their upper 8 bits, where PIL clips at 255. With another libjpeg, those of a JPEG may differ by up
/// to 3 of 255 levels. Grey images get three equal channels, transparency is dropped, and CMYK is
/// converted. Gamma, colour profiles and the EXIF orientation are ignored, so a photograph that was
/// taken sideways stays sideways. JPEG has no checksums: damage that leaves the structure intact is
/// not noticed, as in PIL.
///
/// @return  images (N, 3, height, width), with the names of the classes
/// Error for options out of range. FileError with the path, what was expected and what was found:
/// for a folder that is missing or unreadable, has train without test and val or the reverse, or
/// both test and val, for fewer than two classes, for a class without images, for splits with
/// different classes, for links that form a loop, for a file that cannot be read or decoded, is
/// truncated or corrupt, has more than 2^28 bytes or 2^27 pixels, for an image whose longer side is
/// more than four times its shorter one and that would be scaled to more than 2^27 pixels, for
/// images of different sizes unless there is a size, and for more than max_bytes.
ImageSet load_image_folder(const std::filesystem::path& folder, Split split,
                           const ImageFolderOptions& options = {});

}  // namespace semitone::zoo
