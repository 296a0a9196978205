#include "src/zoo/cifar_files.h"

#include "semitone/core/error.h"
#include "src/zoo/byte_source.h"

#include <c10/util/StringUtil.h>
#include <torch/types.h>

#include <algorithm>

namespace semitone::zoo {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kCifarSide = 32;
constexpr std::int64_t kCifarPixels = 3 * kCifarSide * kCifarSide;
// The names of 100 classes have 1 KB.
constexpr std::int64_t kMaxNames = std::int64_t{1} << 16;

// @param max_bytes  what earlier files have left of the limit
// @param limit      of all files together, for the message
at::Tensor read_all(const fs::path& path, std::int64_t max_bytes, std::int64_t limit) {
  ByteSource source(path, kCifar);
  const auto most = static_cast<std::int64_t>(
      std::min<std::uint64_t>(source.most_bytes(), static_cast<std::uint64_t>(max_bytes)));
  // One byte more than there may be tells whether there is more.
  const at::Tensor data = read_at_most(source, most + 1);
  if (data.numel() > max_bytes) {
    throw FileError(
        kCifar,
        c10::str("at most ", limit, " bytes of data up to the end of '", path.string(), "'"),
        "more");
  }
  return data;
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

}  // namespace

std::vector<std::string> read_class_names(const fs::path& path, std::int64_t classes) {
  if (!is_there(path)) return {};
  const at::Tensor bytes = read_all(path, kMaxNames, kMaxNames);
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

ImageSet read_cifar(const std::vector<fs::path>& files, const std::vector<CifarLabel>& labels,
                    std::size_t chosen, std::int64_t max_bytes) {
  const auto prefix = static_cast<std::int64_t>(labels.size());
  const std::int64_t record = prefix + kCifarPixels;
  std::vector<at::Tensor> its_images;
  std::vector<at::Tensor> its_labels;
  std::int64_t left = max_bytes;
  for (const fs::path& path : files) {
    const at::Tensor bytes = read_all(path, left, max_bytes);
    left -= bytes.numel();
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

}  // namespace semitone::zoo
