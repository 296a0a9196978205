#include "apps/semitone/train_data.h"

#include "semitone/core/error.h"
#include "semitone/zoo/cifar.h"
#include "semitone/zoo/image_folder.h"
#include "semitone/zoo/mnist.h"
#include "src/core/env.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace semitone::cli {
namespace {

namespace fs = std::filesystem;

// A format of data sets, which the name of a file or folder reveals.
struct Format {
  std::string_view name;
  std::array<std::string_view, 4> prefixes;  // of such names; the rest are empty
  zoo::ImageSet (*load)(const fs::path& folder, zoo::Split split);
};

constexpr std::array kFormats{
    Format{"MNIST",
           {"train-images", "train-labels", "t10k-images", "t10k-labels"},
           [](const fs::path& folder, zoo::Split split) { return zoo::load_mnist(folder, split); }},
    Format{
        "CIFAR-10",
        {"data_batch_", "test_batch.bin", "cifar-10-batches-bin"},
        [](const fs::path& folder, zoo::Split split) { return zoo::load_cifar10(folder, split); }},
    Format{"CIFAR-100",
           {"train.bin", "test.bin", "cifar-100-binary"},
           [](const fs::path& folder, zoo::Split split) {
             return zoo::load_cifar100(folder, split);
           }}};

bool has_prefix(const Format& format, std::string_view name) {
  return std::any_of(format.prefixes.begin(), format.prefixes.end(), [&](std::string_view prefix) {
    return !prefix.empty() && name.starts_with(prefix);
  });
}

// The one format of which the folder has a file. Null if it has sub-folders only.
const Format* format_of(const fs::path& folder, std::string_view component) {
  std::array<bool, kFormats.size()> found{};
  bool has_folders = false;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;
    has_folders |= !name.starts_with('.') && entry->is_directory(ignored);
    for (std::size_t i = 0; i < kFormats.size(); ++i) found[i] |= has_prefix(kFormats[i], name);
  }
  if (error)
    throw FileError(component, "to read the folder '" + folder.string() + "'", error.message());
  const Format* format = nullptr;
  for (std::size_t i = 0; i < kFormats.size(); ++i) {
    if (!found[i]) continue;
    if (format != nullptr) {
      throw FileError(component, "one data set in '" + folder.string() + "'",
                      std::string(format->name) + " and " + std::string(kFormats[i].name),
                      "give --data the folder that has the files of one of them");
    }
    format = &kFormats[i];
  }
  if (format == nullptr && !has_folders) {
    throw FileError(component,
                    "the files of MNIST, CIFAR-10 or CIFAR-100, or folders of images, in '" +
                        folder.string() + "'",
                    "none", "check --data; semitone train --help names the files");
  }
  return format;
}

}  // namespace

std::string default_data_dir() {
  return env::get(env::kDataDir).value_or(SEMITONE_DEFAULT_DATA_DIR);
}

void add_data_flags(Flags& add, DataFlags& flags) {
  flags.directory = default_data_dir();
  add.text("--data", flags.directory, "DIR", "Directory of the data set");
  add.integer("--image-size", flags.image_size, 0, 1 << 14,
              "Height and width to which a folder's images are scaled and cropped; 0: as they are");
  add.number(
      "--test-share", flags.test_share, [](double value) { return value > 0 && value < 1; },
      "above 0 and below 1",
      "Share of a folder's images that is held out for the test, if it has no folder train");
}

train::Task load_task(const train::ModelChoice& model, const DataFlags& flags,
                      std::string_view component) {
  const std::string& directory = flags.directory;
  std::error_code ignored;
  if (!fs::is_directory(directory, ignored)) {
    throw FileError(component, "a folder with the data at '" + directory + "'", "none",
                    std::string("give --data DIR or set ") + env::kDataDir.name);
  }
  const Format* const format = format_of(directory, component);
  if (format != nullptr) {
    if (flags.image_size > 0) {
      throw UsageError(component, "--image-size with a folder of images only",
                       std::string(format->name) + " in '" + directory + "'");
    }
    return train::image_task(model, format->load(directory, zoo::Split::train),
                             format->load(directory, zoo::Split::test));
  }
  zoo::ImageFolderOptions options;
  options.test_share(flags.test_share);
  if (flags.image_size > 0) options.size(flags.image_size);
  return train::image_task(model, zoo::load_image_folder(directory, zoo::Split::train, options),
                           zoo::load_image_folder(directory, zoo::Split::test, options));
}

}  // namespace semitone::cli
