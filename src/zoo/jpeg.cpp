// JPEG, read by libjpeg-turbo through libjpeg's functions, which leave by longjmp when something is
// wrong.

#include "src/zoo/image.h"

#include <torch/types.h>

#include <jpeglib.h>  // needs <cstdio>

#include <array>
#include <csetjmp>
#include <cstdio>
#include <string>

namespace semitone::zoo {
namespace {

// Limits the time: a scan of a few bytes makes libjpeg visit every block of a progressive image.
// Encoders write about ten; libjpeg-turbo's own programs have the same limit.
constexpr int kMostScans = 500;

// An image that is being read. No function that libjpeg calls, or that calls libjpeg, has a local
// object with a destructor, which longjmp would skip.
class JpegReader {
 public:
  JpegReader(std::string_view bytes, std::string_view name) : bytes_(bytes), name_(name) {
    info_.err = jpeg_std_error(&errors_);
    errors_.error_exit = fail;
    errors_.emit_message = ignore;
    info_.client_data = this;
    progress_.progress_monitor = limit_scans;
  }
  ~JpegReader() { jpeg_destroy_decompress(&info_); }
  JpegReader(const JpegReader&) = delete;
  JpegReader& operator=(const JpegReader&) = delete;

  void read_header() { require(try_header()); }
  // @param pixels  room for height x width x channels
  void read_rows(std::uint8_t* pixels) { require(try_rows(pixels)); }

  std::uint64_t height() const { return info_.image_height; }
  std::uint64_t width() const { return info_.image_width; }
  // 4 for CMYK, otherwise 3.
  std::uint64_t channels() const { return info_.out_color_space == JCS_CMYK ? 4 : 3; }

 private:
  static JpegReader& reader_of(j_common_ptr info) {
    return *static_cast<JpegReader*>(info->client_data);
  }

  [[noreturn]] static void fail(j_common_ptr info) {
    JpegReader& reader = reader_of(info);
    info->err->format_message(info, reader.problem_.data());
    std::longjmp(reader.jump_, 1);
  }

  static void ignore(j_common_ptr, int) {}

  [[noreturn]] static boolean end(j_decompress_ptr info) {
    JpegReader& reader = reader_of(reinterpret_cast<j_common_ptr>(info));
    reader.has_ended_ = true;
    std::longjmp(reader.jump_, 1);
  }

  static void limit_scans(j_common_ptr info) {
    if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number <= kMostScans) return;
    JpegReader& reader = reader_of(info);
    reader.has_too_many_scans_ = true;
    std::longjmp(reader.jump_, 1);
  }

  bool try_header() {
    if (setjmp(jump_) != 0) return false;
    jpeg_create_decompress(&info_);
    info_.progress = &progress_;
    jpeg_mem_src(&info_, reinterpret_cast<const unsigned char*>(bytes_.data()), bytes_.size());
    // libjpeg's own function takes the end of the data for the end of the image.
    info_.src->fill_input_buffer = end;
    jpeg_read_header(&info_, TRUE);
    const bool is_cmyk = info_.jpeg_color_space == JCS_CMYK || info_.jpeg_color_space == JCS_YCCK;
    info_.out_color_space = is_cmyk ? JCS_CMYK : JCS_RGB;
    return true;
  }

  bool try_rows(std::uint8_t* pixels) {
    if (setjmp(jump_) != 0) return false;
    jpeg_start_decompress(&info_);
    while (info_.output_scanline < info_.output_height) {
      JSAMPROW row = pixels + channels() * width() * info_.output_scanline;
      jpeg_read_scanlines(&info_, &row, 1);
    }
    jpeg_finish_decompress(&info_);
    return true;
  }

  void require(bool success) const {
    if (has_ended_) throw_damaged_image("a whole JPEG", name_, "one that ends early");
    if (has_too_many_scans_) {
      throw_damaged_image("at most " + std::to_string(kMostScans) + " scans of a JPEG", name_,
                          "more");
    }
    if (!success)
      throw_damaged_image("a sound JPEG", name_,
                          "'" + std::string(problem_.data()) + "' from libjpeg");
  }

  std::string_view bytes_;
  std::string_view name_;
  bool has_ended_ = false;
  bool has_too_many_scans_ = false;
  std::array<char, JMSG_LENGTH_MAX> problem_{};
  std::jmp_buf jump_{};
  jpeg_error_mgr errors_{};
  jpeg_progress_mgr progress_{};
  jpeg_decompress_struct info_{};
};

// The colours of CMYK as PIL computes them. Its samples are inverted in JPEG files, as Adobe's
// programs write them: 255 is no ink.
at::Tensor rgb_of(const at::Tensor& cmyk) {
  const std::int64_t count = cmyk.size(0) * cmyk.size(1);
  at::Tensor rgb = torch::empty({cmyk.size(0), cmyk.size(1), 3}, torch::kByte);
  const auto* in = cmyk.const_data_ptr<std::uint8_t>();
  auto* out = rgb.mutable_data_ptr<std::uint8_t>();
  for (std::int64_t i = 0; i < count; ++i, in += 4, out += 3) {
    const unsigned black = in[3];
    for (int channel = 0; channel < 3; ++channel) {
      const unsigned product = (255U - in[channel]) * black + 128;
      out[channel] = static_cast<std::uint8_t>(black - (product + (product >> 8)) / 256);
    }
  }
  return rgb;
}

}  // namespace

bool is_jpeg(std::string_view bytes) {
  return bytes.starts_with("\xff\xd8\xff");
}

at::Tensor decode_jpeg(std::string_view bytes, std::string_view name, std::int64_t max_pixels) {
  JpegReader reader(bytes, name);
  reader.read_header();
  check_pixels(reader.height(), reader.width(), max_pixels, name);
  const auto i64 = [](std::uint64_t value) { return static_cast<std::int64_t>(value); };
  const at::Tensor pixels = torch::empty(
      {i64(reader.height()), i64(reader.width()), i64(reader.channels())}, torch::kByte);
  reader.read_rows(pixels.mutable_data_ptr<std::uint8_t>());
  const at::Tensor rgb = reader.channels() == 4 ? rgb_of(pixels) : pixels;
  return rgb.permute({2, 0, 1}).contiguous();
}

}  // namespace semitone::zoo
