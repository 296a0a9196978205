#include "semitone/zoo/cifar.h"

#include "semitone/core/error.h"
#include "src/zoo/byte_source.h"
#include "src/zoo/cifar_files.h"

#include <c10/util/StringUtil.h>

#include <string>
#include <system_error>
#include <vector>

namespace semitone::zoo {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kFineClasses = 100;
constexpr std::int64_t kCoarseClasses = 20;

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
  ImageSet set = read_cifar(files, {{"labels", kClassesOf10}}, 0, max_bytes);
  set.class_names = read_class_names(place / "batches.meta.txt", kClassesOf10);
  return set;
}

ImageSet load_cifar100(const fs::path& folder, Split split, Cifar100Labels labels,
                       std::int64_t max_bytes) {
  const fs::path place = folder_of(folder, "cifar-100-binary");
  const bool is_fine = labels == Cifar100Labels::fine;
  ImageSet set = read_cifar({find_cifar(place, split == Split::train ? "train.bin" : "test.bin")},
                            {{"coarse labels", kCoarseClasses}, {"fine labels", kFineClasses}},
                            is_fine ? 1 : 0, max_bytes);
  set.class_names = read_class_names(
      place / (is_fine ? "fine_label_names.txt" : "coarse_label_names.txt"), set.classes);
  return set;
}

}  // namespace semitone::zoo
