#include "apps/semitone/train_data.h"

#include "semitone/core/error.h"
#include "semitone/zoo/cifar.h"
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

// The one format of which the folder has a file.
const Format& format_of(const fs::path& folder, std::string_view component) {
  std::array<bool, kFormats.size()> found{};
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
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
  if (format == nullptr) {
    throw FileError(component,
                    "the files of MNIST, CIFAR-10 or CIFAR-100 in '" + folder.string() + "'",
                    "none", "check --data; semitone train --help names the files");
  }
  return *format;
}

}  // namespace

std::string default_data_dir() {
  return env::get(env::kDataDir).value_or(SEMITONE_DEFAULT_DATA_DIR);
}

train::DataSet load_data(const std::string& directory, std::string_view component) {
  std::error_code ignored;
  if (!fs::is_directory(directory, ignored)) {
    throw FileError(component, "a folder with the data at '" + directory + "'", "none",
                    std::string("give --data DIR or set ") + env::kDataDir.name);
  }
  const Format& format = format_of(directory, component);
  return {format.load(directory, zoo::Split::train), format.load(directory, zoo::Split::test)};
}

}  // namespace semitone::cli
