#include "apps/semitone/train_data.h"

#include "semitone/core/error.h"
#include "semitone/zoo/cifar.h"
#include "semitone/zoo/image_folder.h"
#include "semitone/zoo/mnist.h"
#include "semitone/zoo/text.h"
#include "src/core/env.h"
#include "src/zoo/data_limit.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
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
  std::array<std::string_view, 8> prefixes;  // of such names; the rest are empty
  zoo::ImageSet (*load)(const fs::path& folder, zoo::Split split);
};

constexpr std::array kFormats{
    Format{"MNIST",
           {"train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1",
            "train-images.idx3", "train-labels.idx1", "t10k-images.idx3", "t10k-labels.idx1"},
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

// Flags that only make sense with one kind of data.
struct FlagOfOneKind {
  const char* flag;
  train::DataKind kind;
};

constexpr std::array kFlagsOfOneKind{FlagOfOneKind{"--augment", train::kImages},
                                     FlagOfOneKind{"--image-size", train::kImages},
                                     FlagOfOneKind{"--memory-format", train::kImages},
                                     FlagOfOneKind{"--sequence-length", train::kText}};

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

// In GiB: more than a machine has, and in bytes still a number of 64 bits.
constexpr double kMostMaxData = 1e9;

std::int64_t max_data_bytes(const DataFlags& flags) {
  return std::max<std::int64_t>(1, std::llround(std::ldexp(flags.max_data, 30)));
}

// Calls load(). If data are beyond the loader's max_bytes, its error gets this program's remedy.
template <typename Load>
auto load_within_limit(const Load& load, std::string_view remedy) {
  try {
    return load();
  } catch (const zoo::DataLimitError& error) {
    throw FileError(error.component(), error.expected(), error.got(), remedy);
  }
}

train::Task load_image_task(const train::ModelChoice& model, const DataFlags& flags,
                            std::string_view component) {
  const std::string& directory = flags.path;
  std::error_code error;
  const fs::file_type type = fs::status(directory, error).type();
  if (type == fs::file_type::regular) {
    throw FileError(
        component,
        fmt::format("a folder with images at '{}' for --model {}", directory, model.name), "a file",
        "give --data DIR, or for a text --model gpt");
  }
  // It may well be there: without a permission, or where the file system does not answer.
  if (error && type != fs::file_type::not_found)
    throw FileError(component, "to read the folder '" + directory + "'", error.message());
  if (type != fs::file_type::directory) {
    throw FileError(component, "a folder with the data at '" + directory + "'",
                    type == fs::file_type::not_found ? "none" : "something else of that name",
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
  options.test_share(flags.test_share).max_bytes(max_data_bytes(flags));
  if (flags.image_size > 0) options.size(flags.image_size);
  return load_within_limit(
      [&] {
        return train::image_task(model,
                                 zoo::load_image_folder(directory, zoo::Split::train, options),
                                 zoo::load_image_folder(directory, zoo::Split::test, options));
      },
      "set a smaller --image-size, or raise --max-data");
}

train::Task load_text_task(const train::ModelChoice& model, const DataFlags& flags,
                           std::string_view component) {
  const fs::path file = flags.path;
  std::error_code ignored;
  if (fs::is_directory(file, ignored)) {
    throw FileError(component,
                    fmt::format("a text file at '{}' for --model {}", flags.path, model.name),
                    "a folder", "give --data FILE");
  }
  const zoo::Text text =
      load_within_limit([&] { return zoo::load_text(file, max_data_bytes(flags)); },
                        "raise --max-data, or use a part of the text");
  // The bytes of a vocabulary ascend. Those of images contain 0, and so do those of UTF-16.
  if (text.vocabulary.starts_with('\0')) {
    throw FileError(component, fmt::format("a text in '{}' for --model {}", flags.path, model.name),
                    "bytes that are 0", "give --data a text in UTF-8 or another encoding of bytes");
  }
  return train::text_task(
      model, text,
      train::TextOptions().sequence_length(flags.sequence_length).test_share(flags.test_share));
}

}  // namespace

std::string default_data_dir() {
  return env::get(env::kDataDir).value_or(SEMITONE_DEFAULT_DATA_DIR);
}

void add_data_flags(Flags& add, DataFlags& flags) {
  flags.path = default_data_dir();
  add.text("--data", flags.path, "DIR|FILE", "Directory of images, or for gpt a text file");
  add.integer("--image-size", flags.image_size, 0, 1 << 14,
              "Height and width to which a folder's images are scaled and cropped; 0: as they are");
  add.number(
      "--max-data", flags.max_data, [](double value) { return value > 0 && value <= kMostMaxData; },
      "above 0 and up to 1e9",
      "Most memory, in GiB, that a text may take, or each split of a folder's images");
  add.number(
      "--test-share", flags.test_share, [](double value) { return value > 0 && value < 1; },
      "above 0 and below 1",
      "Share that is held out for the test, of a text, or of a folder's images if it has no folder "
      "train");
  add.integer("--sequence-length", flags.sequence_length, 1, 1 << 16,
              "Characters of a text from which gpt predicts the next one, at most");
}

void apply_model(CLI::App& command, const train::ModelChoice& model, std::string_view component) {
  for (const auto& [flag, kind] : kFlagsOfOneKind) {
    if (command.count(flag) > 0 && model.kind() != kind) {
      throw UsageError(component, fmt::format("{} with a model for {}", flag, kind.name),
                       fmt::format("--model {}", model.name));
    }
  }
  for (const train::FlagDefault& fallback : model.defaults) {
    CLI::Option* const option = command.get_option(std::string(fallback.flag));
    if (option->count() > 0) continue;
    option->get_callback()({std::string(fallback.value)});
    option->default_str(std::string(fallback.value));
  }
}

std::string model_defaults_help() {
  std::string help;
  for (const train::ModelChoice& model : train::models()) {
    if (model.defaults.empty()) continue;
    help += fmt::format("Defaults of {}:", model.name);
    for (const train::FlagDefault& fallback : model.defaults)
      help += fmt::format(" {} {}", fallback.flag, fallback.value);
    help += '\n';
  }
  return help;
}

train::Task load_task(const train::ModelChoice& model, const DataFlags& flags,
                      std::string_view component) {
  return model.kind() == train::kText ? load_text_task(model, flags, component)
                                      : load_image_task(model, flags, component);
}

}  // namespace semitone::cli
