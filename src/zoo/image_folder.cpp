#include "semitone/zoo/image_folder.h"

#include "semitone/core/error.h"
#include "src/core/parallel_for.h"
#include "src/core/splitmix64.h"
#include "src/zoo/byte_source.h"
#include "src/zoo/data_limit.h"
#include "src/zoo/image.h"

#include <torch/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace semitone::zoo {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kLargestFile = std::size_t{1} << 28;
constexpr std::array<std::string_view, 8> kSuffixes{".jpg", ".jpeg", ".jpe", ".jfif",
                                                    ".png", ".ppm",  ".pgm", ".pnm"};
constexpr std::array<std::string_view, 11> kOtherSuffixes{
    ".bmp", ".gif", ".tif", ".tiff", ".webp", ".heic", ".heif", ".avif", ".jp2", ".jxl", ".pbm"};

std::string quoted(const fs::path& path) {
  return "'" + path.string() + "'";
}

void check(const ImageFolderOptions& options) {
  if (options.size().has_value() && *options.size() < 1)
    throw Error(kImageFolder, "a size of at least 1", std::to_string(*options.size()));
  if (!(options.test_share() > 0 && options.test_share() < 1)) {
    throw Error(kImageFolder, "a test_share above 0 and below 1",
                std::to_string(options.test_share()));
  }
  if (options.max_bytes() < 1)
    throw Error(kImageFolder, "max_bytes of at least 1", std::to_string(options.max_bytes()));
}

// Whether the path leads to a folder. FileError for a link that leads nowhere, or in a loop.
bool is_folder(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found)
    throw FileError(kImageFolder, "a file or folder at " + quoted(path), "none");
  if (error) throw FileError(kImageFolder, "to read " + quoted(path), error.message());
  return status.type() == fs::file_type::directory;
}

// What a folder has, without names that begin with a dot, by name.
std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (!entry->path().filename().string().starts_with('.')) entries.push_back(entry->path());
  }
  if (error) throw FileError(kImageFolder, "to read the folder " + quoted(folder), error.message());
  std::sort(entries.begin(), entries.end(), [](const fs::path& a, const fs::path& b) {
    return a.filename().native() < b.filename().native();
  });
  return entries;
}

std::vector<std::string> folders_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const fs::path& entry : entries_of(folder)) {
    if (is_folder(entry)) names.push_back(entry.filename().string());
  }
  return names;
}

std::string in_lower_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return text;
}

bool is_image(const fs::path& path) {
  const std::string suffix = in_lower_case(path.extension().string());
  if (std::find(kOtherSuffixes.begin(), kOtherSuffixes.end(), suffix) != kOtherSuffixes.end()) {
    throw FileError(
        kImageFolder, "PNG, JPEG, PPM and PGM images", quoted(path),
        "convert it with ImageMagick's mogrify -format png, for example, and remove it");
  }
  return std::find(kSuffixes.begin(), kSuffixes.end(), suffix) != kSuffixes.end();
}

// Adds the images below a folder.
// @param above  the folders that lead to it, without links
void add_images(const fs::path& folder, std::vector<fs::path>& above,
                std::vector<fs::path>& images) {
  std::error_code error;
  const fs::path real = fs::canonical(folder, error);
  if (error) throw FileError(kImageFolder, "to read the folder " + quoted(folder), error.message());
  if (std::find(above.begin(), above.end(), real) != above.end()) {
    throw FileError(kImageFolder, "folders below " + quoted(above.front()),
                    "a loop: " + quoted(folder) + " leads back to " + quoted(real),
                    "remove the link");
  }
  above.push_back(real);
  for (const fs::path& entry : entries_of(folder)) {
    if (is_folder(entry)) {
      add_images(entry, above, images);
    } else if (is_image(entry)) {
      images.push_back(entry);
    }
  }
  above.pop_back();
}

struct Files {
  std::vector<fs::path> paths;
  std::vector<std::int64_t> labels;
};

struct Place {
  fs::path folder;  // of the classes
  bool has_splits = false;
  std::vector<std::string> classes;
};

// "Training" and "Testing" would be two classes.
void require_no_other_splits(const fs::path& folder, const std::vector<std::string>& names) {
  bool has_train = false;
  std::string list;
  for (const std::string& name : names) {
    const std::string lower = in_lower_case(name);
    list += (list.empty() ? "" : ", ") + name;
    has_train = has_train || lower.starts_with("train");
    if (!lower.starts_with("train") && !lower.starts_with("test") && !lower.starts_with("val"))
      return;
  }
  if (names.size() < 2 || !has_train) return;
  throw FileError(kImageFolder, "folders train and test, or train and val, in " + quoted(folder),
                  list, "rename them");
}

// The folder of a split's classes.
Place place_of(const fs::path& folder, Split split) {
  const std::vector<std::string> names = folders_in(folder);
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  const bool has_test = has("test");
  const bool has_val = has("val");
  Place place{folder, has("train"), names};
  if (!place.has_splits && (has_test || has_val)) {
    throw FileError(kImageFolder, "a folder train in " + quoted(folder),
                    has_test ? "test only" : "val only");
  }
  if (!place.has_splits) {
    require_no_other_splits(folder, names);
    return place;
  }
  if (has_test == has_val) {
    throw FileError(kImageFolder, "train, and test or val, in " + quoted(folder),
                    has_test ? "both" : "train only");
  }
  const fs::path train = folder / "train";
  const fs::path test = folder / (has_test ? "test" : "val");
  place.folder = split == Split::train ? train : test;
  place.classes = folders_in(train);
  const std::vector<std::string> others = folders_in(test);
  if (others != place.classes) {
    const auto [ours, theirs] =
        std::mismatch(place.classes.begin(), place.classes.end(), others.begin(), others.end());
    const bool is_missing =
        ours != place.classes.end() && (theirs == others.end() || *ours < *theirs);
    throw FileError(kImageFolder, "the same classes in " + quoted(train) + " and " + quoted(test),
                    (is_missing ? *ours : *theirs) +
                        (is_missing ? " in the first only" : " in the second only"));
  }
  return place;
}

// A number that depends on the seed and a name, equally on every machine: FNV-1a, mixed by splitmix64.
std::uint64_t number_of(std::uint64_t seed, std::string_view name) {
  std::uint64_t value = 0xCBF29CE484222325U ^ (seed * 0x9E3779B97F4A7C15U);
  for (const char letter : name)
    value = (value ^ static_cast<unsigned char>(letter)) * 0x100000001B3U;
  return mix_bits(value);
}

// The images of a class in a split, if its folder has both.
std::vector<fs::path> held_out(const std::vector<fs::path>& images, const fs::path& folder,
                               Split split, const ImageFolderOptions& options) {
  const auto count = static_cast<std::int64_t>(images.size());
  std::int64_t tested = std::llround(options.test_share() * static_cast<double>(count));
  tested = count < 2 ? 0 : std::clamp<std::int64_t>(tested, 1, count - 1);
  std::vector<std::pair<std::uint64_t, std::size_t>> order;
  for (std::size_t i = 0; i < images.size(); ++i) {
    const std::string name = images[i].lexically_relative(folder).generic_string();
    order.emplace_back(number_of(options.seed(), name), i);
  }
  std::sort(order.begin(), order.end());
  const auto middle = order.begin() + tested;
  std::vector<std::size_t> chosen;
  for (auto item = split == Split::test ? order.begin() : middle;
       item != (split == Split::test ? middle : order.end()); ++item)
    chosen.push_back(item->second);
  std::sort(chosen.begin(), chosen.end());
  std::vector<fs::path> result;
  result.reserve(chosen.size());
  for (const std::size_t index : chosen) result.push_back(images[index]);
  return result;
}

Files files_of(const Place& place, Split split, const ImageFolderOptions& options) {
  Files files;
  for (std::size_t label = 0; label < place.classes.size(); ++label) {
    const fs::path folder = place.folder / place.classes[label];
    std::vector<fs::path> images;
    std::vector<fs::path> above;
    add_images(folder, above, images);
    if (images.empty())
      throw FileError(kImageFolder, "images in the folder of a class, " + quoted(folder), "none");
    if (!place.has_splits) images = held_out(images, place.folder, split, options);
    files.paths.insert(files.paths.end(), images.begin(), images.end());
    files.labels.insert(files.labels.end(), images.size(), static_cast<std::int64_t>(label));
  }
  if (files.paths.empty()) {
    throw FileError(kImageFolder, "at least two images of a class in " + quoted(place.folder),
                    "one of each, and none to hold out for the test");
  }
  return files;
}

at::Tensor read_image(const fs::path& path, const ImageFolderOptions& options) {
  ByteSource source(path, kImageFolder);
  std::string bytes(std::min<std::uint64_t>(source.most_bytes(), kLargestFile) + 1, '\0');
  bytes.resize(source.read(bytes.data(), bytes.size()));
  if (bytes.size() > kLargestFile) {
    throw FileError(kImageFolder,
                    "at most " + std::to_string(kLargestFile) + " bytes in " + quoted(path),
                    "more");
  }
  const at::Tensor image = decode_image(bytes, path.string());
  return options.size().has_value() ? scale_and_crop(image, *options.size(), path.string()) : image;
}

}  // namespace

ImageSet load_image_folder(const fs::path& folder, Split split, const ImageFolderOptions& options) {
  check(options);
  require_folder(folder, kImageFolder);
  const Place place = place_of(folder, split);
  if (place.classes.size() < 2) {
    throw FileError(kImageFolder,
                    "a sub-folder for each of at least two classes in " + quoted(place.folder),
                    std::to_string(place.classes.size()));
  }
  const Files files = files_of(place, split, options);
  const auto count = static_cast<std::int64_t>(files.paths.size());
  const auto require_memory = [&](at::IntArrayRef sizes) {
    double bytes = static_cast<double>(count);
    for (const std::int64_t size : sizes) bytes *= static_cast<double>(size);
    if (bytes <= static_cast<double>(options.max_bytes())) return;
    throw DataLimitError(
        kImageFolder,
        c10::str("at most ", options.max_bytes(), " bytes of images in ", quoted(folder)),
        c10::str(count, " images of sizes ", sizes), "set a smaller size, or raise max_bytes");
  };
  if (options.size().has_value()) require_memory({3, *options.size(), *options.size()});
  const at::Tensor first = read_image(files.paths.front(), options);
  require_memory(first.sizes());
  at::Tensor images = torch::empty({count, 3, first.size(1), first.size(2)}, torch::kByte);
  // Not copy_(): these threads are not in the caller's inference mode.
  auto* const bytes = images.mutable_data_ptr<std::uint8_t>();
  std::atomic<bool> has_failed = false;
  const auto read_share = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end && !has_failed.load(std::memory_order_relaxed); ++i) {
      const fs::path& path = files.paths[static_cast<std::size_t>(i)];
      const at::Tensor image = i == 0 ? first : read_image(path, options);
      if (image.sizes() != first.sizes()) {
        throw FileError(kImageFolder,
                        c10::str("images of ", first.size(1), " x ", first.size(2), ", as ",
                                 quoted(files.paths.front())),
                        c10::str(image.size(1), " x ", image.size(2), " in ", quoted(path)),
                        "set the size to which images are scaled and cropped");
      }
      std::memcpy(bytes + i * image.numel(), image.contiguous().const_data_ptr<std::uint8_t>(),
                  static_cast<std::size_t>(image.numel()));
    }
  };
  parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
    try {
      read_share(begin, end);
    } catch (...) {
      // Otherwise the error would come when the other threads have read their images, which can
      // take minutes.
      has_failed = true;
      throw;
    }
  });
  return {images, torch::tensor(files.labels, torch::kLong),
          static_cast<std::int64_t>(place.classes.size()), place.classes};
}

}  // namespace semitone::zoo
