#include "semitone/zoo/mnist.h"

#include "semitone/core/error.h"
#include "semitone/zoo/idx.h"
#include "src/zoo/byte_source.h"

#include <c10/util/StringUtil.h>
#include <torch/types.h>

#include <algorithm>
#include <string>
#include <system_error>

namespace semitone::zoo {
namespace {

namespace fs = std::filesystem;

constexpr auto kMnist = "zoo.mnist";
constexpr std::int64_t kSide = 28;
constexpr std::int64_t kClasses = 10;

// @param name  "train-images", @param kind  "idx3-ubyte"
fs::path find(const fs::path& folder, const std::string& name, const std::string& kind) {
  for (const char* suffix : {"", ".gz"}) {
    for (const char* separator : {"-", "."}) {
      const fs::path path = folder / c10::str(name, separator, kind, suffix);
      std::error_code ignored;
      // Some copies have folders of these names beside the files. Of a path that the system does
      // not show, the reader says why.
      const auto type = fs::status(path, ignored).type();
      if (type != fs::file_type::not_found && type != fs::file_type::directory) return path;
    }
  }
  throw FileError(kMnist, "a file " + name + "-" + kind + "[.gz] in '" + folder.string() + "'",
                  "none", "check the path");
}

void check_images(const at::Tensor& images, const fs::path& path) {
  if (images.dim() == 3 && images.size(1) == kSide && images.size(2) == kSide &&
      images.size(0) > 0) {
    return;
  }
  throw FileError(kMnist, "at least one image of 28 x 28 in '" + path.string() + "'",
                  c10::str("sizes ", images.sizes()));
}

void check_labels(const at::Tensor& labels, std::int64_t images, const fs::path& path) {
  if (labels.dim() != 1 || labels.size(0) != images) {
    throw FileError(
        kMnist, std::to_string(images) + " labels, one for each image, in '" + path.string() + "'",
        c10::str("sizes ", labels.sizes()));
  }
  const auto* const begin = labels.const_data_ptr<std::uint8_t>();
  const auto* const end = begin + images;
  const auto* const bad =
      std::find_if(begin, end, [](std::uint8_t label) { return label >= kClasses; });
  if (bad != end) {
    throw FileError(kMnist, "labels from 0 to 9 in '" + path.string() + "'",
                    std::to_string(*bad) + " at index " + std::to_string(bad - begin));
  }
}

}  // namespace

ImageSet load_mnist(const fs::path& folder, Split split) {
  require_folder(folder, kMnist);
  const std::string half = split == Split::train ? "train" : "t10k";
  const fs::path images_path = find(folder, half + "-images", "idx3-ubyte");
  const fs::path labels_path = find(folder, half + "-labels", "idx1-ubyte");
  at::Tensor images = read_idx(images_path);
  check_images(images, images_path);
  const at::Tensor labels = read_idx(labels_path);
  check_labels(labels, images.size(0), labels_path);
  return {std::move(images), labels.to(torch::kLong), kClasses};
}

}  // namespace semitone::zoo
