// images.json: the colours that PIL reads from image files. Written by images.py.

#include "semitone/core/error.h"
#include "src/zoo/image.h"
#include "tests/support/conformance.h"
#include "tests/support/errors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace semitone::zoo {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string bytes_of(const nlohmann::json& hex) {
  const auto digits = hex.get<std::string>();
  std::string bytes;
  for (std::size_t i = 0; i < digits.size(); i += 2)
    bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return bytes;
}

struct File {
  std::string name;
  std::string bytes;
  at::Tensor colours;  // (3, height, width)

  bool is_png() const { return zoo::is_png(bytes); }
};

const std::vector<File>& files() {
  static const std::vector<File> all = [] {
    std::vector<File> read;
    const auto data = test::conformance("images.json");
    for (const auto& image : data.at("images")) {
      const std::string colours = bytes_of(image.at("colours"));
      at::Tensor pixels = torch::empty(
          {image.at("height").get<std::int64_t>(), image.at("width").get<std::int64_t>(), 3},
          torch::kByte);
      std::copy(colours.begin(), colours.end(), pixels.mutable_data_ptr<std::uint8_t>());
      read.push_back({image.at("name").get<std::string>(), bytes_of(image.at("file")),
                      pixels.permute({2, 0, 1}).contiguous()});
    }
    return read;
  }();
  return all;
}

const File& file(const std::string& name) {
  for (const File& candidate : files()) {
    if (candidate.name == name) return candidate;
  }
  throw std::runtime_error("no image " + name);
}

std::string refusal(const std::string& bytes, std::int64_t max_pixels = kMostPixels) {
  return test::message_of<FileError>([&] { decode_image(bytes, "a/b", max_pixels); });
}

TEST(ImageFiles, AreDecodedAsByPil) {
  // libjpeg's implementations of the inverse transform, and of the conversion of colours, may
  // differ by one level each, of which CMYK's conversion adds up two.
  constexpr int kLevels = 3;
  EXPECT_GE(files().size(), 50U);
  for (const File& image : files()) {
    const at::Tensor decoded = decode_image(image.bytes, image.name);
    ASSERT_EQ(decoded.sizes(), image.colours.sizes()) << image.name;
    EXPECT_TRUE(decoded.is_contiguous()) << image.name;
    const at::Tensor difference = decoded.to(torch::kInt) - image.colours.to(torch::kInt);
    EXPECT_LE(difference.abs().max().item<int>(), image.is_png() ? 0 : kLevels) << image.name;
  }
}

TEST(ImageFiles, AreRefusedIfTheyEndEarly) {
  for (const File& image : files()) {
    if (image.name.ends_with("with_more_data")) continue;
    const std::string format = image.is_png() ? "PNG" : "JPEG";
    for (std::size_t size = image.is_png() ? 8 : 3; size < image.bytes.size(); ++size) {
      EXPECT_THAT(refusal(image.bytes.substr(0, size)),
                  HasSubstr("[zoo.image_folder] expected a whole " + format + " in 'a/b', got "))
          << image.name << " up to byte " << size;
    }
  }
}

TEST(ImageFiles, WithAnotherByteAreDecodedOrRefusedWithoutOutput) {
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  for (const File& image : files()) {
    for (std::size_t at = 0; at < image.bytes.size(); ++at) {
      for (const int mask : {0x01, 0x10, 0xff}) {
        std::string changed = image.bytes;
        changed[at] = static_cast<char>(changed[at] ^ mask);
        try {
          const at::Tensor decoded = decode_image(changed, "a/b", 1 << 16);
          EXPECT_EQ(decoded.size(0), 3);
          // Every byte of a PNG is below a checksum, except for what follows the pixels.
          if (image.is_png() && image.name != "png_with_more_data") {
            ADD_FAILURE() << image.name << " with another byte " << at;
          }
        } catch (const FileError& error) {
          EXPECT_THAT(error.what(), HasSubstr("'a/b'"));
        }
      }
    }
  }
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(ImageFiles, SizesAreLimitedBeforeMemoryIsAllocated) {
  for (const char* const name : {"rgb_8", "jpeg", "jpeg_progressive"}) {
    const File& image = file(name);
    const std::int64_t pixels = image.colours.numel() / 3;
    EXPECT_EQ(decode_image(image.bytes, "", pixels).sizes(), image.colours.sizes());
    EXPECT_THAT(refusal(image.bytes, pixels - 1),
                HasSubstr("expected at most " + std::to_string(pixels - 1) + " pixels in 'a/b'"));
  }
  // The frame header: its length, the depth, then the height and the width.
  std::string huge = file("jpeg_progressive").bytes;
  huge.replace(huge.find("\xff\xc2") + 5, 4, "\xff\xdc\xff\xdc");
  EXPECT_THAT(refusal(huge), HasSubstr("at most 134217728 pixels in 'a/b', got 65500 x 65500"));
}

TEST(ImageFiles, AJpegHasALimitedNumberOfScans) {
  const std::string& whole = file("jpeg_grey_progressive").bytes;
  const std::size_t scan = whole.rfind("\xff\xda");
  ASSERT_NE(scan, std::string::npos);
  const auto repeated = [&](int count) {
    std::string bytes = whole.substr(0, scan);
    for (int i = 0; i < count; ++i) bytes += whole.substr(scan, whole.size() - 2 - scan);
    return bytes + whole.substr(whole.size() - 2);
  };
  EXPECT_EQ(decode_image(repeated(400), "").sizes(), (std::vector<std::int64_t>{3, 11, 19}));
  EXPECT_THAT(refusal(repeated(501)), HasSubstr("at most 500 scans of a JPEG in 'a/b', got more"));
}

TEST(ImageFiles, ErrorsHaveTheLibrarysWords) {
  std::string jpeg = file("jpeg").bytes;
  jpeg[jpeg.find("\xff\xc0") + 4] = 9;  // the depth of samples
  EXPECT_THAT(refusal(jpeg), AllOf(StartsWith("[zoo.image_folder] expected a sound JPEG in 'a/b', "
                                              "got 'Unsupported JPEG data precision 9' from "
                                              "libjpeg"),
                                   HasSubstr("remove it")));
  std::string png = file("rgb_8").bytes;
  png[png.find("IDAT") + 5] ^= 1;
  EXPECT_THAT(refusal(png), HasSubstr("expected a sound PNG in 'a/b', got 'IDAT: "));
}

}  // namespace
}  // namespace semitone::zoo
