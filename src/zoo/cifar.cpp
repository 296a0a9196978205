#include "semitone/zoo/cifar.h"

#include "semitone/core/error.h"
#include "src/zoo/byte_source.h"

#include <c10/util/StringUtil.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <string>
#include <system_error>
#include <vector>

namespace semitone::zoo {
namespace {

namespace fs = std::filesystem;

constexpr auto kCifar = "zoo.cifar";
constexpr std::int64_t kCifarSide = 32;
constexpr std::int64_t kCifarPixels = 3 * kCifarSide * kCifarSide;
constexpr std::int64_t kFineClasses = 100;
constexpr std::int64_t kCoarseClasses = 20;
// The names of 100 classes have 1 KB.
constexpr std::int64_t kMaxNames = std::int64_t{1} << 16;

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::status(path, ignored).type() != fs::file_type::not_found;
}

// The folder, or its sub-folder of the original archive.
fs::path folder_of(const fs::path& folder, const char* sub_folder) {
  require_folder(folder, kCifar);
  std::error_code error;
  const fs::path inner = folder / sub_folder;
  return fs::is_directory(inner, error) ? inner : folder;
}

fs::path find_cifar(const fs::path& folder, const std::string& name) {
  for (const char* const suffix : {"", ".gz"}) {
    const fs::path path = folder / (name + suffix);
    if (is_there(path)) return path;
  }
  throw FileError(kCifar, "a file " + name + "[.gz]" + in(folder), "none",
                  "give the folder of CIFAR's binary version (.bin)");
}

at::Tensor read_all(const fs::path& path, std::int64_t max_bytes) {
  ByteSource source(path, kCifar);
  const auto most = static_cast<std::int64_t>(
      std::min<std::uint64_t>(source.most_bytes(), static_cast<std::uint64_t>(max_bytes)));
  // One byte more than there may be tells whether there is more.
  const at::Tensor data = read_at_most(source, most + 1);
  if (data.numel() > max_bytes) {
    throw FileError(kCifar, "at most " + std::to_string(max_bytes) + " bytes of data" + in(path),
                    "more");
  }
  return data;
}

// The names of the classes, one on each line. None if there is no such file.
std::vector<std::string> read_names(const fs::path& path, std::int64_t classes) {
  if (!is_there(path)) return {};
  const at::Tensor bytes = read_all(path, kMaxNames);
  std::vector<std::string> names;
  std::string line;
  const auto end_line = [&] {
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
    if (!line.empty()) names.push_back(line);
    line.clear();
  };
  const auto* const begin = bytes.const_data_ptr<std::uint8_t>();
  for (const auto* byte = begin; byte != begin + bytes.numel(); ++byte) {
    if (*byte == '\n') {
      end_line();
    } else {
      line.push_back(static_cast<char>(*byte));
    }
  }
  end_line();
  if (static_cast<std::int64_t>(names.size()) != classes) {
    throw FileError(kCifar, std::to_string(classes) + " names of classes" + in(path),
                    std::to_string(names.size()));
  }
  return names;
}

void check_label_range(const at::Tensor& labels, std::int64_t classes, const char* kind,
                       const fs::path& path) {
  const at::Tensor wrong = (labels >= classes).nonzero();
  if (wrong.size(0) == 0) return;
  const auto index = wrong[0][0].item<std::int64_t>();
  throw FileError(kCifar, c10::str(kind, " from 0 to ", classes - 1, in(path)),
                  c10::str(labels[index].item<std::int64_t>(), " at image ", index),
                  "is this another data set, or is the file corrupt?");
}

struct Label {
  const char* kind;
  std::int64_t classes;
};

// @param labels  the bytes before the pixels
// @param chosen  which of them is returned
ImageSet read_files(const std::vector<fs::path>& files, const std::vector<Label>& labels,
                    std::size_t chosen, std::int64_t max_bytes) {
  const auto prefix = static_cast<std::int64_t>(labels.size());
  const std::int64_t record = prefix + kCifarPixels;
  std::vector<at::Tensor> its_images;
  std::vector<at::Tensor> its_labels;
  for (const fs::path& path : files) {
    const at::Tensor bytes = read_all(path, max_bytes);
    max_bytes -= bytes.numel();
    if (bytes.numel() == 0) throw FileError(kCifar, "at least one image" + in(path), "none");
    if (bytes.numel() % record != 0) {
      throw FileError(kCifar, c10::str("whole images of ", record, " bytes", in(path)),
                      c10::str(bytes.numel(), " bytes, which is ", bytes.numel() / record,
                               " images and ", bytes.numel() % record, " bytes"),
                      "copy the file again");
    }
    const at::Tensor records = bytes.view({-1, record});
    for (std::size_t i = 0; i < labels.size(); ++i) {
      check_label_range(records.select(1, static_cast<std::int64_t>(i)), labels[i].classes,
                        labels[i].kind, path);
    }
    its_labels.push_back(records.select(1, static_cast<std::int64_t>(chosen)).to(torch::kLong));
    its_images.push_back(
        records.narrow(1, prefix, kCifarPixels).reshape({-1, 3, kCifarSide, kCifarSide}));
  }
  return {torch::cat(its_images), torch::cat(its_labels), labels[chosen].classes};
}

}  // namespace

ImageSet load_cifar10(const fs::path& folder, Split split, std::int64_t max_bytes) {
  constexpr std::int64_t kClassesOf10 = 10;
  constexpr int kTrainingFiles = 5;
  const fs::path place = folder_of(folder, "cifar-10-batches-bin");
  std::vector<fs::path> files;
  if (split == Split::test) {
    files.push_back(find_cifar(place, "test_batch.bin"));
  } else {
    for (int i = 1; i <= kTrainingFiles; ++i)
      files.push_back(find_cifar(place, c10::str("data_batch_", i, ".bin")));
  }
  ImageSet set = read_files(files, {{"labels", kClassesOf10}}, 0, max_bytes);
  set.class_names = read_names(place / "batches.meta.txt", kClassesOf10);
  return set;
}

ImageSet load_cifar100(const fs::path& folder, Split split, Cifar100Labels labels,
                       std::int64_t max_bytes) {
  const fs::path place = folder_of(folder, "cifar-100-binary");
  const bool is_fine = labels == Cifar100Labels::fine;
  ImageSet set = read_files({find_cifar(place, split == Split::train ? "train.bin" : "test.bin")},
                            {{"coarse labels", kCoarseClasses}, {"fine labels", kFineClasses}},
                            is_fine ? 1 : 0, max_bytes);
  set.class_names = read_names(
      place / (is_fine ? "fine_label_names.txt" : "coarse_label_names.txt"), set.classes);
  return set;
}

}  // namespace semitone::zoo
