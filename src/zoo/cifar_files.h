#pragma once

#include "semitone/zoo/image_set.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace semitone::zoo {

// The component in errors.
inline constexpr auto kCifar = "zoo.cifar";

// A byte before the pixels of an image, and how many values it may have.
struct CifarLabel {
  const char* kind;  // "labels", for messages
  std::int64_t classes;
};

// The images of CIFAR's binary files, plain or gzipped. See load_cifar10 for the errors.
// @param labels     the bytes before the pixels; all are checked
// @param chosen     which of them is returned
// @param max_bytes  of the unpacked files together
ImageSet read_cifar(const std::vector<std::filesystem::path>& files,
                    const std::vector<CifarLabel>& labels, std::size_t chosen,
                    std::int64_t max_bytes);

// The names of the classes, one on each line. None if there is no such file; FileError for another
// number of names.
std::vector<std::string> read_class_names(const std::filesystem::path& path, std::int64_t classes);

}  // namespace semitone::zoo
