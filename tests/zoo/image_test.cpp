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

using test::png_bytes;
using test::png_chunk;
using test::ppm_bytes;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string message(const std::string& bytes, std::int64_t max_pixels = kMostPixels) {
  return test::message_of<FileError>([&] { decode_image(bytes, "a/b.png", max_pixels); });
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

std::string header(char height, char width, char bits, char colour, char interlaced = 0) {
  return png_chunk("IHDR", {0, 0, 0, width, 0, 0, 0, height, bits, colour, 0, 0, interlaced});
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

TEST(Image, DecodesPngOfEveryFilter) {
  const at::Tensor image = noise({3, 11, 7});
  for (int filter = 0; filter <= 4; ++filter)
    EXPECT_TRUE(torch::equal(decode_image(png_bytes(image, filter), ""), image)) << filter;
}

TEST(Image, DecodesPngOfEveryColourTypeAndDepth) {
  const auto decoded = [](char height, char width, char bits, char colour,
                          const std::string& rows) {
    return decode_image(png(header(height, width, bits, colour), rows), "");
  };
  const auto grey = [](std::vector<std::int64_t> values) {
    const auto width = static_cast<std::int64_t>(values.size());
    return three(torch::tensor(values, torch::kLong).to(torch::kByte).view({1, 1, width}));
  };
  const std::string zero(1, '\0');  // the filter
  EXPECT_TRUE(torch::equal(decoded(1, 10, 1, 0, zero + "\xa5\x40"),
                           grey({255, 0, 255, 0, 0, 255, 0, 255, 0, 255})));
  EXPECT_TRUE(torch::equal(decoded(1, 5, 2, 0, zero + "\x1b\x80"), grey({0, 85, 170, 255, 170})));
  EXPECT_TRUE(torch::equal(decoded(1, 3, 4, 0, zero + "\x1f\x20"), grey({17, 255, 34})));
  EXPECT_TRUE(torch::equal(decoded(1, 2, 8, 0, zero + "\x01\xfe"), grey({1, 254})));
  EXPECT_TRUE(torch::equal(decoded(1, 2, 16, 0, zero + "\x01\xff\xfe\x01"), grey({1, 254})));
  EXPECT_TRUE(torch::equal(decoded(1, 2, 8, 4, zero + "\x05\x80\x06\xff"), grey({5, 6})));
  EXPECT_TRUE(torch::equal(decoded(1, 1, 16, 4, zero + "\x05\x01\x80\x80"), grey({5})));
  const at::Tensor rgb = torch::tensor({1, 2, 3}, torch::kByte).view({3, 1, 1});
  EXPECT_TRUE(torch::equal(decoded(1, 1, 8, 6, zero + "\1\2\3\4"), rgb));
  EXPECT_TRUE(torch::equal(decoded(1, 1, 16, 2, zero + "\1\377\2\377\3\377"), rgb));
  const auto with_palette = [&](const std::string& rows) {
    return magic() + header(1, 2, 4, 3) + png_chunk("PLTE", "\7\7\7\1\2\3") +
           png_chunk("tRNS", "a") + png_chunk("IDAT", test::zlib(rows)) + png_chunk("IEND", "");
  };
  EXPECT_TRUE(
      torch::equal(decode_image(with_palette(zero + "\x10"), "").select(2, 0).unsqueeze(2), rgb));
  EXPECT_THAT(message(with_palette(zero + "\x12")), HasSubstr("colours of the palette"));
}

TEST(Image, APngMayHaveItsPixelsInSeveralChunks) {
  const std::string stream = test::zlib(std::string("\0\1\2\3", 4));
  std::string bytes = magic() + header(1, 1, 8, 2);
  for (const char byte : stream) bytes += png_chunk("IDAT", std::string(1, byte));
  EXPECT_EQ(decode_image(bytes + png_chunk("IEND", ""), "").sum().item<int>(), 6);
  // Without the end of the stream, or with more behind it.
  EXPECT_THAT(
      message(magic() + header(1, 1, 8, 2) +
              png_chunk("IDAT", stream.substr(0, stream.size() - 4)) + png_chunk("IEND", "")),
      HasSubstr("a whole stream of pixels"));
  EXPECT_THAT(message(bytes + png_chunk("IDAT", "x") + png_chunk("IEND", "")),
              HasSubstr("nothing after the pixels"));
}

TEST(Image, DamagedPng) {
  const std::string whole = png_bytes(noise({3, 6, 5}), 4);
  for (std::size_t size = magic().size(); size < whole.size(); ++size) {
    EXPECT_THAT(message(whole.substr(0, size)), HasSubstr("a whole PNG in 'a/b.png', got one that"))
        << size;
  }
  for (std::size_t at = magic().size(); at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    EXPECT_THAT(message(changed), HasSubstr("in 'a/b.png'")) << at;
  }
  const std::string row("\0\1\2\3", 4);
  EXPECT_THAT(message(png(header(1, 1, 8, 2), row + "x")), HasSubstr("got more"));
  EXPECT_THAT(message(png(header(1, 1, 8, 2), row.substr(1))), HasSubstr("ends early"));
  EXPECT_THAT(message(png(header(1, 1, 8, 2), "\5abc")), HasSubstr("filters from 0 to 4"));
  EXPECT_THAT(message(png(header(1, 1, 4, 2), row)), HasSubstr("got 2 and 4"));
  EXPECT_THAT(message(png(header(1, 1, 8, 5), row)), HasSubstr("got 5 and 8"));
  EXPECT_THAT(message(png(header(0, 1, 8, 2), row)), HasSubstr("0 x 1"));
  EXPECT_THAT(message(png(header(1, 1, 8, 2, 1), row)),
              AllOf(HasSubstr("without interlacing"), HasSubstr("mogrify")));
  EXPECT_THAT(message(png(header(1, 1, 8, 2) + png_chunk("ABCD", ""), row)),
              HasSubstr("an unknown one"));
  EXPECT_THAT(message(png("", row)), HasSubstr("as the first chunk"));
  EXPECT_THAT(message(png(header(1, 1, 8, 2) + header(1, 1, 8, 2), row)), HasSubstr("one IHDR"));
  EXPECT_THAT(message(magic() + header(1, 1, 8, 2) + png_chunk("IEND", "")),
              HasSubstr("ends early"));
}

TEST(Image, SizesAreLimitedBeforeMemoryIsAllocated) {
  const std::string whole = png_bytes(noise({3, 6, 5}), 0);
  EXPECT_EQ(decode_image(whole, "", 30).numel(), 90);
  EXPECT_THAT(message(whole, 29), AllOf(HasSubstr("at most 29 pixels"), HasSubstr("6 x 5")));
  // 100 megapixels, for which there are a few bytes.
  const std::string huge =
      png_chunk("IHDR", std::string("\0\0\x27\x10\0\0\x27\x10\x08\2\0\0\0", 13));
  EXPECT_THAT(message(png(huge, "x")), HasSubstr("too little data for its size"));
}

TEST(Image, OtherFormatsAreNamed) {
  EXPECT_THAT(message("\xff\xd8\xff\xe0"),
              AllOf(HasSubstr("[zoo.image_folder] expected a PNG, PPM or PGM image in 'a/b.png'"),
                    HasSubstr("got a JPEG"), HasSubstr("mogrify")));
  EXPECT_THAT(message("GIF89a"), HasSubstr("got another format"));
  EXPECT_THAT(message(""), HasSubstr("got another format"));
}

TEST(Image, IsScaledToItsShorterSideAndCutInTheMiddle) {
  const at::Tensor image = noise({3, 6, 6});
  EXPECT_TRUE(torch::equal(scale_and_crop(image, 6), image));
  // Wide and high images: the middle. Python rounds 2.5 to 2.
  const at::Tensor wide = noise({3, 6, 11});
  EXPECT_TRUE(torch::equal(scale_and_crop(wide, 6), wide.narrow(2, 2, 6)));
  const at::Tensor high = noise({3, 10, 6});
  EXPECT_TRUE(torch::equal(scale_and_crop(high, 6), high.narrow(1, 2, 6)));
  // A constant stays, and halving is a weighted mean around each pair, at most one off by rounding.
  EXPECT_TRUE(torch::equal(scale_and_crop(torch::full({3, 9, 20}, 77, torch::kByte), 4),
                           torch::full({3, 4, 4}, 77, torch::kByte)));
  at::Tensor edge = torch::zeros({3, 8, 8}, torch::kByte);
  edge.narrow(2, 4, 4).fill_(200);
  const at::Tensor half = scale_and_crop(edge, 4).to(torch::kLong);
  EXPECT_LE((half.select(2, 0)).max().item<int>(), 1);
  EXPECT_GE((half.select(2, 3)).min().item<int>(), 199);
  // The triangle of width 4 around the pixels 2 and 3 has the weights 1 3 3 1 over 8.
  EXPECT_NEAR(half[0][0][1].item<int>(), 25, 1);
  EXPECT_NEAR(half[0][0][2].item<int>(), 175, 1);
  EXPECT_EQ(scale_and_crop(noise({3, 3, 40}), 5).sizes(), (std::vector<std::int64_t>{3, 5, 5}));
}

}  // namespace
}  // namespace semitone::zoo
