#include "src/zoo/image.h"

#include "semitone/core/error.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

namespace semitone::zoo {
namespace {

// The numbers and comments before the pixels of a PPM or PGM file.
class PnmHeader {
 public:
  PnmHeader(std::string_view bytes, std::string_view name) : bytes_(bytes), name_(name) {}

  std::uint64_t number() {
    skip_space();
    constexpr std::uint64_t kLargest = 1'000'000'000;
    std::uint64_t value = 0;
    const std::size_t begin = at_;
    for (; at_ < bytes_.size() && bytes_[at_] >= '0' && bytes_[at_] <= '9'; ++at_) {
      value = 10 * value + static_cast<std::uint64_t>(bytes_[at_] - '0');
      if (value > kLargest)
        throw_damaged_image("sizes of at most 1000000000", name_, "a larger one");
    }
    if (at_ == begin)
      throw_damaged_image("a width, a height and a largest value", name_, "other text");
    return value;
  }

  // What follows the one character after the last number.
  std::string_view rest() const {
    return at_ < bytes_.size() ? bytes_.substr(at_ + 1) : std::string_view();
  }

 private:
  void skip_space() {
    constexpr std::string_view kSpace = " \t\n\v\f\r";
    while (at_ < bytes_.size()) {
      if (bytes_[at_] == '#') {
        at_ = std::min(bytes_.find('\n', at_), bytes_.size());
      } else if (kSpace.find(bytes_[at_]) == std::string_view::npos) {
        return;
      } else {
        ++at_;
      }
    }
  }

  std::string_view bytes_;
  std::string_view name_;
  std::size_t at_ = 2;  // behind P5 or P6
};

struct ScaledSize {
  std::int64_t rows;
  std::int64_t columns;
};

// The size of an image whose shorter side is scaled to a size.
ScaledSize scaled_size(std::int64_t height, std::int64_t width, std::int64_t size) {
  if (height > width) return {size * height / width, size};
  return {size, size * width / height};
}

}  // namespace

void throw_damaged_image(std::string_view expected, std::string_view name, std::string_view got) {
  throw FileError(kImageFolder, std::string(expected) + " in '" + std::string(name) + "'", got,
                  "copy or convert the file again, or remove it");
}

void check_pixels(std::uint64_t height, std::uint64_t width, std::int64_t max_pixels,
                  std::string_view name) {
  const std::string got = std::to_string(height) + " x " + std::to_string(width);
  if (height == 0 || width == 0) throw_damaged_image("pixels", name, got);
  if (height > static_cast<std::uint64_t>(max_pixels) / width) {
    throw FileError(
        kImageFolder,
        "at most " + std::to_string(max_pixels) + " pixels in '" + std::string(name) + "'", got,
        "scale the image down, or remove it");
  }
}

void check_scaled_pixels(std::int64_t height, std::int64_t width, std::int64_t size,
                         std::string_view name) {
  constexpr std::int64_t kUsualRatio = 4;
  if (std::max(height, width) <= kUsualRatio * std::min(height, width)) return;
  const auto [rows, columns] = scaled_size(height, width, size);
  if (rows <= kMostPixels / columns) return;
  throw FileError(kImageFolder,
                  "at most " + std::to_string(kMostPixels) + " pixels in '" + std::string(name) +
                      "' with a shorter side of " + std::to_string(size),
                  std::to_string(rows) + " x " + std::to_string(columns),
                  "crop the image, or remove it");
}

at::Tensor decode_pnm(std::string_view bytes, std::string_view name, std::int64_t max_pixels) {
  PnmHeader header(bytes, name);
  const std::uint64_t width = header.number();
  const std::uint64_t height = header.number();
  const std::uint64_t largest = header.number();
  check_pixels(height, width, max_pixels, name);
  if (largest != 255 && largest != 65535)
    throw_damaged_image("a largest value of 255 or 65535", name, std::to_string(largest));
  const std::uint64_t samples = bytes[1] == '6' ? 3 : 1;
  const std::uint64_t bytes_each = largest > 255 ? 2 : 1;
  const std::uint64_t size = height * width * samples * bytes_each;
  const std::string_view pixels = header.rest();
  if (pixels.size() < size) {
    throw_damaged_image(std::to_string(size) + " bytes of pixels", name,
                        std::to_string(pixels.size()));
  }
  const auto i64 = [](std::uint64_t value) { return static_cast<std::int64_t>(value); };
  at::Tensor image =
      torch::empty({i64(height), i64(width), i64(samples), i64(bytes_each)}, torch::kByte);
  std::memcpy(image.mutable_data_ptr(), pixels.data(), size);
  return image.select(3, 0).permute({2, 0, 1}).expand({3, -1, -1}).contiguous();
}

at::Tensor decode_image(std::string_view bytes, std::string_view name, std::int64_t max_pixels) {
  if (is_png(bytes)) return decode_png(bytes, name, max_pixels);
  if (is_jpeg(bytes)) return decode_jpeg(bytes, name, max_pixels);
  if (bytes.starts_with("P5") || bytes.starts_with("P6"))
    return decode_pnm(bytes, name, max_pixels);
  throw FileError(kImageFolder, "a PNG, JPEG, PPM or PGM image in '" + std::string(name) + "'",
                  "another format",
                  "convert the file, with ImageMagick's mogrify -format png for example");
}

at::Tensor scale_and_crop(const at::Tensor& image, std::int64_t size, std::string_view name) {
  const std::int64_t height = image.size(1);
  const std::int64_t width = image.size(2);
  check_scaled_pixels(height, width, size, name);
  const ScaledSize to = scaled_size(height, width, size);
  // Python rounds halves to even, as lrint does.
  const auto first = [size](std::int64_t all) -> std::int64_t {
    return std::lrint(static_cast<double>(all - size) / 2);
  };
  const auto middle = [&](const at::Tensor& scaled) {
    return scaled.narrow(1, first(to.rows), size).narrow(2, first(to.columns), size);
  };
  if (to.rows == height && to.columns == width) return middle(image);
  // The whole image is scaled although only its middle is needed. LibTorch's kernel computes the
  // centre of each filter in fp32, from the image's edge, so a part of the image would get slightly
  // different pixels.
  const at::Tensor scaled =
      at::_upsample_bilinear2d_aa(image.unsqueeze(0).to(torch::kFloat), {to.rows, to.columns},
                                  /*align_corners=*/false)
          .squeeze(0);
  return middle(scaled).round().clamp_(0, 255).to(torch::kByte);
}

}  // namespace semitone::zoo
