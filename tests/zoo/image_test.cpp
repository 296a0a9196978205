#include "src/zoo/image.h"

#include "semitone/core/error.h"
#include "tests/support/errors.h"
#include "tests/support/image_files.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace semitone::zoo {
namespace {

using test::png_chunk;
using test::ppm_bytes;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string message(const std::string& bytes) {
  return test::message_of<FileError>([&] { decode_image(bytes, "a/b.png"); });
}

at::Tensor noise(std::vector<std::int64_t> sizes) {
  torch::manual_seed(0);
  return torch::randint(0, 256, sizes, torch::kByte);
}

at::Tensor three(const at::Tensor& grey) {
  return grey.expand({3, -1, -1});
}

std::string magic() {
  return "\x89PNG\r\n\x1a\n";
}

std::string header(char height, char width, char bits, char colour) {
  return png_chunk("IHDR", {0, 0, 0, width, 0, 0, 0, height, bits, colour, 0, 0, 0});
}

std::string png(const std::string& head, const std::string& rows) {
  return magic() + head + png_chunk("IDAT", test::zlib(rows)) + png_chunk("IEND", "");
}

TEST(Image, DecodesPpmAndPgm) {
  const at::Tensor image = noise({3, 4, 5});
  EXPECT_TRUE(torch::equal(decode_image(ppm_bytes(image), ""), image));
  const std::string pixels = "\1\2\3\4\5\6";
  const at::Tensor grey = torch::tensor({1, 2, 3, 4, 5, 6}, torch::kByte).view({1, 2, 3});
  EXPECT_TRUE(torch::equal(decode_image("P5 3 2 255\n" + pixels, ""), three(grey)));
  EXPECT_TRUE(torch::equal(decode_image("P5# a\n#b\n3\t2\n# 7\n255 " + pixels, ""), three(grey)));
  // 16 bits, the upper ones first.
  EXPECT_TRUE(torch::equal(decode_image(std::string("P5 3 1 65535\n") + "\1\377\2\377\3\377", ""),
                           three(torch::tensor({1, 2, 3}, torch::kByte).view({1, 1, 3}))));
}

TEST(Image, DamagedPpmAndPgm) {
  const std::string whole = ppm_bytes(noise({3, 4, 5}));
  for (std::size_t size = 2; size < whole.size(); ++size)
    EXPECT_THAT(message(whole.substr(0, size)), HasSubstr("in 'a/b.png'")) << size;
  EXPECT_THAT(message(whole.substr(0, whole.size() - 1)), HasSubstr("60 bytes of pixels"));
  EXPECT_THAT(message("P5 3 x 255\n"), HasSubstr("other text"));
  EXPECT_THAT(message("P5 0 3 255\n"), AllOf(HasSubstr("pixels in"), HasSubstr("3 x 0")));
  EXPECT_THAT(message("P5 1 1 15\n\1"), AllOf(HasSubstr("255 or 65535"), HasSubstr("got 15")));
  EXPECT_THAT(message("P5 99999999999999999999 1 255\n"), HasSubstr("a larger one"));
  EXPECT_THAT(message("P6 1000000000 1000000000 255\n"),
              AllOf(HasSubstr("at most 134217728 pixels"), HasSubstr("1000000000 x 1000000000")));
}

TEST(Image, DamagedPng) {
  const std::string row("\0\1\2\3", 4);
  EXPECT_EQ(decode_image(png(header(1, 1, 8, 2), row), "").sum().item<int>(), 6);
  EXPECT_THAT(message(png(header(1, 1, 8, 2), row.substr(1))),
              HasSubstr("expected a sound PNG in 'a/b.png', got 'Not enough image data'"));
  EXPECT_THAT(message(png(header(1, 1, 8, 2), "\5abc")), HasSubstr("bad adaptive filter value"));
  EXPECT_THAT(message(png(header(1, 1, 4, 2), row)), HasSubstr("a sound PNG"));
  EXPECT_THAT(message(png(header(0, 1, 8, 2), row)), HasSubstr("a sound PNG"));
  EXPECT_THAT(message(png(header(1, 1, 8, 3), row)), HasSubstr("a sound PNG"));  // no palette
  EXPECT_THAT(message(png(header(1, 1, 8, 2) + png_chunk("ABCD", ""), row)),
              HasSubstr("a sound PNG"));
  EXPECT_EQ(decode_image(png(header(1, 1, 8, 2) + png_chunk("abCd", "x"), row), "").numel(), 3);
  EXPECT_THAT(message(png("", row)), HasSubstr("a sound PNG"));
  EXPECT_THAT(message(png(header(1, 1, 8, 2) + header(1, 1, 8, 2), row)), HasSubstr("a sound PNG"));
  EXPECT_THAT(message(magic() + header(1, 1, 8, 2) + png_chunk("IEND", "")),
              HasSubstr("a sound PNG"));
}

TEST(Image, APngHasEnoughDataForItsSize) {
  // 100 megapixels, for which there are a few bytes.
  const std::string huge =
      png_chunk("IHDR", std::string("\0\0\x27\x10\0\0\x27\x10\x08\2\0\0\0", 13));
  EXPECT_THAT(message(png(huge, "x")), HasSubstr("too little data for its size"));
}

TEST(Image, OtherFormatsAreNamed) {
  EXPECT_THAT(
      message("GIF89a"),
      AllOf(HasSubstr("[zoo.image_folder] expected a PNG, JPEG, PPM or PGM image in 'a/b.png', got "
                      "another format"),
            HasSubstr("mogrify")));
  EXPECT_THAT(message(""), HasSubstr("got another format"));
}

TEST(Image, IsScaledToItsShorterSideAndCutInTheMiddle) {
  const at::Tensor image = noise({3, 6, 6});
  EXPECT_TRUE(torch::equal(scale_and_crop(image, 6, ""), image));
  // Wide and high images: the middle. Python rounds 2.5 to 2.
  const at::Tensor wide = noise({3, 6, 11});
  EXPECT_TRUE(torch::equal(scale_and_crop(wide, 6, ""), wide.narrow(2, 2, 6)));
  const at::Tensor high = noise({3, 10, 6});
  EXPECT_TRUE(torch::equal(scale_and_crop(high, 6, ""), high.narrow(1, 2, 6)));
  // A constant stays, and halving is a weighted mean around each pair, at most one off by rounding.
  EXPECT_TRUE(torch::equal(scale_and_crop(torch::full({3, 9, 20}, 77, torch::kByte), 4, ""),
                           torch::full({3, 4, 4}, 77, torch::kByte)));
  at::Tensor edge = torch::zeros({3, 8, 8}, torch::kByte);
  edge.narrow(2, 4, 4).fill_(200);
  const at::Tensor half = scale_and_crop(edge, 4, "").to(torch::kLong);
  EXPECT_LE((half.select(2, 0)).max().item<int>(), 1);
  EXPECT_GE((half.select(2, 3)).min().item<int>(), 199);
  // The triangle of width 4 around the pixels 2 and 3 has the weights 1 3 3 1 over 8.
  EXPECT_NEAR(half[0][0][1].item<int>(), 25, 1);
  EXPECT_NEAR(half[0][0][2].item<int>(), 175, 1);
  EXPECT_EQ(scale_and_crop(noise({3, 3, 40}), 5, "").sizes(), (std::vector<std::int64_t>{3, 5, 5}));
}

TEST(Image, ALongImageThatScalingWouldMakeTooLargeIsRefused) {
  const auto refusal = [](const at::Tensor& image, std::int64_t size) {
    return test::message_of<FileError>([&] { scale_and_crop(image, size, "a/b.pgm"); });
  };
  const at::Tensor wide = torch::zeros({3, 1, 20000}, torch::kByte);
  // Of 64 TB, whose allocation fails at once.
  EXPECT_THAT(refusal(wide, 16384),
              AllOf(HasSubstr("[zoo.image_folder] expected at most 134217728 pixels in 'a/b.pgm' "
                              "with a shorter side of 16384, got 16384 x 327680000"),
                    HasSubstr("crop the image")));
  EXPECT_THAT(refusal(wide.transpose(1, 2), 16384), HasSubstr("got 327680000 x 16384"));
  // The largest width at a height of 1 for ImageNet's size.
  check_scaled_pixels(1, 2674, 224, "");
  EXPECT_THROW(check_scaled_pixels(1, 2675, 224, ""), FileError);
  // Of other images, the size alone makes them large.
  check_scaled_pixels(100, 400, 16384, "");
  EXPECT_THROW(check_scaled_pixels(100, 401, 16384, ""), FileError);
  // An image that becomes smaller is within the limit of its file.
  check_scaled_pixels(1000, 134217, 999, "");
}

TEST(Image, ALongImageWithinTheLimitIsScaled) {
  const at::Tensor grey = torch::full({3, 1, 3000}, 77, torch::kByte);
  const at::Tensor scaled = scale_and_crop(grey, 8, "");
  EXPECT_TRUE(torch::equal(scaled, torch::full({3, 8, 8}, 77, torch::kByte)));
  // Nothing but the result stays in memory.
  EXPECT_EQ(scaled.storage().nbytes(), 3U * 8 * 8);
}

}  // namespace
}  // namespace semitone::zoo
