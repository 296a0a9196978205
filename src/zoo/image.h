#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace semitone::zoo {

// The component in errors.
inline constexpr auto kImageFolder = "zoo.image_folder";

// The largest height times width of an image, in its file and scaled.
inline constexpr std::int64_t kMostPixels = std::int64_t{1} << 27;

// Decodes the bytes of a PNG, JPEG, or binary PPM or PGM file (P6, P5), which its content tells, not
// its name. The result is that of PIL's convert("RGB"), except that 16 bits become the upper 8, also
// where PIL cuts grey values off at 255. Grey images get three equal channels, transparency is
// dropped, and CMYK is converted. Gamma, colour profiles and EXIF's orientation are not applied.
//
// @param name        the file's path, for messages
// @param max_pixels  the largest height times width, checked before memory is allocated
// @return            uint8, (3, height, width)
// FileError for another format, and for bytes that are truncated or corrupt: the checksums of a
// PNG's chunks are compared. A JPEG has none, and libjpeg continues after damage that leaves its
// structure whole.
at::Tensor decode_image(std::string_view bytes, std::string_view name,
                        std::int64_t max_pixels = kMostPixels);

// One decoder for each format. Parameters, results and errors are those of decode_image.
bool is_png(std::string_view bytes);
bool is_jpeg(std::string_view bytes);
at::Tensor decode_png(std::string_view bytes, std::string_view name, std::int64_t max_pixels);
at::Tensor decode_jpeg(std::string_view bytes, std::string_view name, std::int64_t max_pixels);
at::Tensor decode_pnm(std::string_view bytes, std::string_view name, std::int64_t max_pixels);

// FileError for an image of no pixels or of too many.
void check_pixels(std::uint64_t height, std::uint64_t width, std::int64_t max_pixels,
                  std::string_view name);
// FileError for an image that scale_and_crop would scale to more than kMostPixels, since one side
// is many times as long as the other: 1 x 20000 pixels would become 224 x 4480000. An image whose
// longer side is at most four times its shorter one is never refused, since its scaled size is the
// caller's choice rather than the file's.
void check_scaled_pixels(std::int64_t height, std::int64_t width, std::int64_t size,
                         std::string_view name);
// Throws FileError for an image that does not follow its format.
[[noreturn]] void throw_damaged_image(std::string_view expected, std::string_view name,
                                      std::string_view got);

// Scales an image so that its shorter side has a size, with antialiasing, and cuts out the middle,
// as torchvision's Resize(size) and CenterCrop(size) do. It allocates up to 36 bytes for each pixel
// of the image or of the scaled image, whichever has more.
// @param image  uint8, (channels, height, width)
// @param name   the file's path, for messages
// @return       uint8, (channels, size, size)
// FileError as check_scaled_pixels, before memory is allocated.
at::Tensor scale_and_crop(const at::Tensor& image, std::int64_t size, std::string_view name);

}  // namespace semitone::zoo
