// PNG (ISO/IEC 15948) without interlacing: chunks, of which the IDAT ones together are a zlib stream of
// filtered rows.

#include "semitone/core/error.h"
#include "src/zoo/image.h"

#include <torch/types.h>

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <vector>

namespace semitone::zoo {
namespace {

constexpr std::string_view kPngMagic("\x89PNG\r\n\x1a\n", 8);

constexpr unsigned kGrey = 0;
constexpr unsigned kRgb = 2;
constexpr unsigned kPalette = 3;
constexpr unsigned kGreyAlpha = 4;
constexpr unsigned kRgba = 6;

std::uint32_t big_endian(std::string_view bytes) {
  std::uint32_t value = 0;
  for (const char byte : bytes.substr(0, 4)) value = 256 * value + static_cast<unsigned char>(byte);
  return value;
}

struct PngHeader {
  std::uint64_t width = 0;
  std::uint64_t height = 0;
  unsigned bits = 0;  // of a sample
  unsigned colour = 0;

  unsigned samples() const {
    switch (colour) {
      case kRgb:
        return 3;
      case kGreyAlpha:
        return 2;
      case kRgba:
        return 4;
      default:
        return 1;
    }
  }
  std::size_t row_bytes() const { return (width * samples() * bits + 7) / 8; }
  // The distance of the filters' left neighbour.
  std::size_t pixel_bytes() const { return std::max<std::size_t>(1, samples() * bits / 8); }
};

bool has_bits(unsigned colour, unsigned bits) {
  const bool is_small = bits == 1 || bits == 2 || bits == 4;
  switch (colour) {
    case kGrey:
      return is_small || bits == 8 || bits == 16;
    case kPalette:
      return is_small || bits == 8;
    case kRgb:
    case kGreyAlpha:
    case kRgba:
      return bits == 8 || bits == 16;
    default:
      return false;
  }
}

PngHeader read_header(std::string_view content, std::string_view name, std::int64_t max_pixels) {
  constexpr std::size_t kSize = 13;
  if (content.size() != kSize) damaged_image("an IHDR of 13 bytes", name, "another size");
  PngHeader header;
  header.width = big_endian(content);
  header.height = big_endian(content.substr(4));
  header.bits = static_cast<unsigned char>(content[8]);
  header.colour = static_cast<unsigned char>(content[9]);
  if (!has_bits(header.colour, header.bits)) {
    damaged_image("a colour type and a depth of PNG", name,
                  std::to_string(header.colour) + " and " + std::to_string(header.bits));
  }
  if (content[10] != 0 || content[11] != 0)
    damaged_image("PNG's compression and filters", name, "others");
  if (content[12] != 0) {
    throw FileError(kImageFolder, "a PNG without interlacing in '" + std::string(name) + "'",
                    "an interlaced one", "convert it, with mogrify -interlace none for example");
  }
  check_pixels(header.height, header.width, max_pixels, name);
  return header;
}

// The zlib stream, which is given piece by piece.
class Rows {
 public:
  Rows(std::size_t size, std::string_view name) : name_(name), bytes_(size) {
    if (inflateInit(&stream_) != Z_OK) damaged_image("memory to unpack the image", name, "none");
    stream_.next_out = bytes_.data();
  }
  ~Rows() { inflateEnd(&stream_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  void add(std::string_view packed) {
    if (packed.empty()) return;
    if (has_ended_) damaged_image("nothing after the pixels", name_, "more data");
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));  // zlib reads it
    stream_.avail_in = static_cast<uInt>(packed.size());
    while (stream_.avail_in > 0 && !has_ended_) {
      const std::size_t room = bytes_.size() - filled_;
      const auto given = static_cast<uInt>(std::min<std::size_t>(room, std::size_t{1} << 30));
      stream_.avail_out = given;
      const int result = inflate(&stream_, Z_NO_FLUSH);
      filled_ += given - stream_.avail_out;
      has_ended_ = result == Z_STREAM_END;
      if (has_ended_) break;
      if (result == Z_BUF_ERROR && room == 0)
        damaged_image("as many pixels as the header says", name_, "more");
      if (result != Z_OK) {
        damaged_image("a sound stream of pixels", name_,
                      stream_.msg == nullptr ? "a corrupt one" : stream_.msg);
      }
    }
    if (stream_.avail_in > 0) damaged_image("nothing after the pixels", name_, "more data");
  }

  std::vector<std::uint8_t>& finished() {
    if (!has_ended_ || filled_ != bytes_.size())
      damaged_image("a whole stream of pixels", name_, "one that ends early");
    return bytes_;
  }

 private:
  std::string_view name_;
  std::vector<std::uint8_t> bytes_;
  z_stream stream_{};
  std::size_t filled_ = 0;
  bool has_ended_ = false;
};

std::uint8_t paeth(int left, int above, int corner) {
  const int estimate = left + above - corner;
  const int to_left = std::abs(estimate - left);
  const int to_above = std::abs(estimate - above);
  const int to_corner = std::abs(estimate - corner);
  if (to_left <= to_above && to_left <= to_corner) return static_cast<std::uint8_t>(left);
  return static_cast<std::uint8_t>(to_above <= to_corner ? above : corner);
}

// Undoes the filter of each row in place. A row has its filter's number before its bytes.
void unfilter(std::vector<std::uint8_t>& bytes, const PngHeader& header, std::string_view name) {
  const std::size_t size = header.row_bytes();
  const std::size_t step = header.pixel_bytes();
  const std::vector<std::uint8_t> zeros(size);
  const std::uint8_t* above = zeros.data();
  for (std::size_t y = 0; y < header.height; ++y) {
    std::uint8_t* const row = bytes.data() + y * (size + 1) + 1;
    const unsigned filter = row[-1];
    if (filter > 4) damaged_image("filters from 0 to 4", name, std::to_string(filter));
    for (std::size_t i = 0; filter > 0 && i < size; ++i) {
      const int left = i < step ? 0 : row[i - step];
      const int corner = i < step ? 0 : above[i - step];
      int guess = 0;
      if (filter == 1) guess = left;
      if (filter == 2) guess = above[i];
      if (filter == 3) guess = (left + above[i]) / 2;
      if (filter == 4) guess = paeth(left, above[i], corner);
      row[i] = static_cast<std::uint8_t>(row[i] + guess);
    }
    above = row;
  }
}

// The upper 8 bits of a sample, or a smaller sample as it is.
unsigned sample(const std::uint8_t* row, std::size_t index, unsigned bits) {
  if (bits >= 8) return row[index * (bits / 8)];
  const std::size_t bit = index * bits;
  return (row[bit / 8] >> (8 - bits - bit % 8)) & ((1U << bits) - 1);
}

at::Tensor image_of(const std::vector<std::uint8_t>& bytes, const PngHeader& header,
                    std::string_view palette, std::string_view name) {
  const auto height = static_cast<std::int64_t>(header.height);
  const auto width = static_cast<std::int64_t>(header.width);
  at::Tensor image = torch::empty({3, height, width}, torch::kByte);
  auto* const red = image.mutable_data_ptr<std::uint8_t>();
  const std::size_t plane = header.height * header.width;
  const unsigned samples = header.samples();
  const bool has_colours = samples >= 3;
  const unsigned to_255 = header.bits < 8 ? 255 / ((1U << header.bits) - 1) : 1;
  for (std::size_t y = 0; y < header.height; ++y) {
    const std::uint8_t* const row = bytes.data() + y * (header.row_bytes() + 1) + 1;
    for (std::size_t x = 0; x < header.width; ++x) {
      for (std::size_t channel = 0; channel < 3; ++channel) {
        unsigned value = sample(row, x * samples + (has_colours ? channel : 0), header.bits);
        if (header.colour == kPalette) {
          if (3 * value + channel >= palette.size())
            damaged_image("colours of the palette", name, "another one");
          value = static_cast<unsigned char>(palette[3 * value + channel]);
        } else {
          value *= to_255;
        }
        red[channel * plane + y * header.width + x] = static_cast<std::uint8_t>(value);
      }
    }
  }
  return image;
}

}  // namespace

bool is_png(std::string_view bytes) {
  return bytes.starts_with(kPngMagic);
}

at::Tensor decode_png(std::string_view bytes, std::string_view name, std::int64_t max_pixels) {
  constexpr std::size_t kFrame = 12;  // of a chunk: length, type and checksum
  PngHeader header;
  std::string_view palette;
  std::string_view type;
  std::vector<std::string_view> data;
  std::string_view rest = bytes.substr(kPngMagic.size());
  while (type != "IEND") {
    if (rest.size() < kFrame || big_endian(rest) > rest.size() - kFrame)
      damaged_image("a whole PNG", name, "one that ends early");
    const std::size_t length = big_endian(rest);
    type = rest.substr(4, 4);
    const std::string_view content = rest.substr(8, length);
    const auto* const summed = reinterpret_cast<const Bytef*>(type.data());
    if (crc32(0, summed, static_cast<uInt>(length + 4)) != big_endian(rest.substr(8 + length)))
      damaged_image("a sound PNG", name, "a chunk with another checksum");
    rest.remove_prefix(kFrame + length);
    if ((header.width == 0) != (type == "IHDR"))
      damaged_image("one IHDR, as the first chunk,", name, "another order");
    if (type == "IHDR") {
      header = read_header(content, name, max_pixels);
    } else if (type == "PLTE") {
      palette = content;
    } else if (type == "IDAT") {
      data.push_back(content);
    } else if (type != "IEND" && (type[0] & 0x20) == 0) {  // not optional
      damaged_image("the chunks of PNG", name, "an unknown one");
    }
  }
  // Deflate packs at most 1032 bytes into one.
  std::size_t packed = 0;
  for (const std::string_view piece : data) packed += piece.size();
  const std::size_t size = header.height * (header.row_bytes() + 1);
  if (packed < size / 1032) damaged_image("a whole PNG", name, "too little data for its size");
  Rows rows(size, name);
  for (const std::string_view piece : data) rows.add(piece);
  unfilter(rows.finished(), header, name);
  return image_of(rows.finished(), header, palette, name);
}

}  // namespace semitone::zoo
