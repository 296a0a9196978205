// PNG, read by libpng. Its simplified functions would apply gamma, so these are the others, which
// leave by longjmp when something is wrong.

#include "src/zoo/image.h"

#include <torch/types.h>

#include <png.h>

#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>

namespace semitone::zoo {
namespace {

constexpr std::string_view kPngMagic("\x89PNG\r\n\x1a\n", 8);

// An image that is being read. No function that libpng calls, or that calls libpng, has a local
// object with a destructor, which longjmp would skip.
class PngReader {
 public:
  PngReader(std::string_view bytes, std::string_view name)
      : rest_(bytes),
        name_(name),
        png_(png_create_read_struct(PNG_LIBPNG_VER_STRING, this, fail, ignore)) {
    if (png_ != nullptr) info_ = png_create_info_struct(png_);
    if (info_ == nullptr) {
      png_destroy_read_struct(&png_, nullptr, nullptr);
      throw std::bad_alloc();
    }
  }
  ~PngReader() { png_destroy_read_struct(&png_, &info_, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  void read_header() { require(try_header()); }
  // @param pixels  room for height x width x 3
  void read_rows(std::uint8_t* pixels) { require(try_rows(pixels)); }

  std::uint64_t height() const { return png_get_image_height(png_, info_); }
  std::uint64_t width() const { return png_get_image_width(png_, info_); }
  // The bytes of a row in the file.
  std::uint64_t row_bytes() const { return png_get_rowbytes(png_, info_); }

 private:
  [[noreturn]] static void fail(png_structp png, png_const_charp problem) {
    auto& reader = *static_cast<PngReader*>(png_get_error_ptr(png));
    std::snprintf(reader.problem_.data(), reader.problem_.size(), "%s", problem);
    png_longjmp(png, 1);
  }

  static void ignore(png_structp, png_const_charp) {}

  static void read(png_structp png, png_bytep to, std::size_t size) {
    auto& reader = *static_cast<PngReader*>(png_get_io_ptr(png));
    if (size > reader.rest_.size()) {
      reader.has_ended_ = true;
      png_longjmp(png, 1);
    }
    std::memcpy(to, reader.rest_.data(), size);
    reader.rest_.remove_prefix(size);
  }

  bool try_header() {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_read_fn(png_, this, read);
    // Every checksum is compared.
    png_set_crc_action(png_, PNG_CRC_ERROR_QUIT, PNG_CRC_ERROR_QUIT);
    // Chunks that pixels do not need, such as compressed texts and profiles, are not unpacked.
    png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
    png_set_user_limits(png_, PNG_UINT_31_MAX, PNG_UINT_31_MAX);  // check_pixels has others
    png_read_info(png_, info_);
    return true;
  }

  bool try_rows(std::uint8_t* pixels) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_expand(png_);  // palettes, and samples of less than 8 bits
    png_set_strip_16(png_);
    png_set_strip_alpha(png_);
    png_set_gray_to_rgb(png_);
    const int passes = png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    if (row_bytes() != 3 * width()) png_error(png_, "rows of another size");
    for (int pass = 0; pass < passes; ++pass) {
      for (std::uint64_t y = 0; y < height(); ++y)
        png_read_row(png_, pixels + 3 * y * width(), nullptr);
    }
    png_read_end(png_, nullptr);
    return true;
  }

  void require(bool success) const {
    if (has_ended_) throw_damaged_image("a whole PNG", name_, "one that ends early");
    if (!success)
      throw_damaged_image("a sound PNG", name_,
                          "'" + std::string(problem_.data()) + "' from libpng");
  }

  std::string_view rest_;
  std::string_view name_;
  bool has_ended_ = false;
  std::array<char, 128> problem_{};
  png_structp png_;
  png_infop info_ = nullptr;
};

}  // namespace

bool is_png(std::string_view bytes) {
  return bytes.starts_with(kPngMagic);
}

at::Tensor decode_png(std::string_view bytes, std::string_view name, std::int64_t max_pixels) {
  PngReader reader(bytes, name);
  reader.read_header();
  check_pixels(reader.height(), reader.width(), max_pixels, name);
  // Deflate packs at most 1032 bytes into one.
  if (bytes.size() < reader.height() * reader.row_bytes() / 1032)
    throw_damaged_image("a whole PNG", name, "too little data for its size");
  const at::Tensor pixels = torch::empty(
      {static_cast<std::int64_t>(reader.height()), static_cast<std::int64_t>(reader.width()), 3},
      torch::kByte);
  reader.read_rows(pixels.mutable_data_ptr<std::uint8_t>());
  return pixels.permute({2, 0, 1}).contiguous();
}

}  // namespace semitone::zoo
