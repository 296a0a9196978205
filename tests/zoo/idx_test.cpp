#include "semitone/zoo/idx.h"

#include "semitone/core/error.h"
#include "tests/support/image_files.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace semitone::zoo {
namespace {

using test::gzip;
using test::idx_bytes;
using ::testing::AllOf;
using ::testing::HasSubstr;

class IdxTest : public ::testing::Test {
 protected:
  at::Tensor read(const std::string& bytes) {
    test::write_text(path_, bytes);
    return read_idx(path_);
  }

  std::string message_for(const std::string& bytes) {
    test::write_text(path_, bytes);
    return message();
  }

  std::string message() {
    try {
      read_idx(path_);
    } catch (const FileError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("[zoo.idx]"), HasSubstr(path_.string())));
      return error.what();
    }
    return "nothing was thrown";
  }

  test::TemporaryFolder folder_;
  std::filesystem::path path_ = folder_ / "some-file";
  at::Tensor data_ = torch::arange(2 * 3 * 5).to(torch::kByte).view({2, 3, 5});
  std::string bytes_ = idx_bytes(data_);
};

TEST_F(IdxTest, ReadsPlainAndGzippedFilesWhateverTheirName) {
  for (const std::string& bytes : {bytes_, gzip(bytes_)}) {
    const at::Tensor read_back = read(bytes);
    EXPECT_EQ(read_back.scalar_type(), torch::kByte);
    EXPECT_TRUE(torch::equal(read_back, data_));
  }
}

TEST_F(IdxTest, ReadsAGzipFileOfSeveralMembers) {
  EXPECT_TRUE(torch::equal(read(gzip(bytes_.substr(0, 9)) + gzip(bytes_.substr(9))), data_));
  EXPECT_TRUE(torch::equal(read(gzip(bytes_) + std::string(300, '\0')), data_)) << "zeros behind";
}

TEST_F(IdxTest, ReadsAnyNumberOfDimensionsAndSizes) {
  for (const at::Tensor& data :
       {torch::zeros({7}, torch::kByte), torch::zeros({0}, torch::kByte),
        torch::zeros({2, 0, 3}, torch::kByte), torch::ones({1, 2, 3, 4, 5}, torch::kByte)}) {
    EXPECT_TRUE(torch::equal(read(idx_bytes(data)), data)) << data.sizes();
    EXPECT_TRUE(torch::equal(read(gzip(idx_bytes(data))), data)) << data.sizes();
  }
}

TEST_F(IdxTest, ReadsDataLargerThanItsFirstPieceOfMemory) {
  const at::Tensor data = torch::randint(0, 256, {50, 1000, 1000}, torch::kByte);
  EXPECT_TRUE(torch::equal(read(idx_bytes(data)), data));
}

TEST_F(IdxTest, MissingAndUnreadable) {
  EXPECT_THAT(message(), HasSubstr("none"));
  path_ = folder_.path();
  EXPECT_THAT(message(), HasSubstr("a regular file"));
  // A regular file that the system refuses to read, also to root.
  path_ = "/proc/self/mem";
  EXPECT_THAT(message(), HasSubstr("to read"));
}

TEST_F(IdxTest, Empty) {
  EXPECT_THAT(message_for(""), HasSubstr("an empty file"));
  EXPECT_THAT(message_for(gzip("")), HasSubstr("a whole IDX header"));
}

TEST_F(IdxTest, TruncatedAnywhere) {
  for (std::size_t size = 1; size < bytes_.size(); ++size) {
    const std::string message = message_for(bytes_.substr(0, size));
    EXPECT_THAT(message, HasSubstr(size < 16 ? "a whole IDX header" : "30 bytes of data")) << size;
    EXPECT_THAT(message_for(gzip(bytes_.substr(0, size))), HasSubstr("expected")) << size;
  }
  const std::string packed = gzip(bytes_);
  for (std::size_t size = 3; size < packed.size(); ++size) {
    EXPECT_THAT(message_for(packed.substr(0, size)), HasSubstr("one that ends early")) << size;
  }
}

TEST_F(IdxTest, DataAfterTheEnd) {
  EXPECT_THAT(message_for(bytes_ + "x"), AllOf(HasSubstr("30 bytes of data"), HasSubstr("more")));
  EXPECT_THAT(message_for(gzip(bytes_ + "x")), HasSubstr("more"));
  EXPECT_THAT(message_for(gzip(bytes_) + gzip("x")), HasSubstr("more"));
  EXPECT_THAT(message_for(gzip(bytes_) + "x"), HasSubstr("nothing after the gzip stream"));
}

TEST_F(IdxTest, AnyFlippedByteOfAGzipStreamsBodyIsNoticed) {
  const std::string packed = gzip(bytes_);
  // The ten bytes of the header hold a time stamp and such, which mean nothing.
  for (std::size_t i = 10; i < packed.size(); ++i) {
    std::string corrupt = packed;
    corrupt[i] = static_cast<char>(corrupt[i] ^ 0x55);
    EXPECT_THAT(message_for(corrupt), HasSubstr("expected")) << i;
  }
}

TEST_F(IdxTest, AWrongSumAtTheEndIsSaidToBeOne) {
  std::string packed = gzip(bytes_);
  packed[packed.size() - 8] = static_cast<char>(packed[packed.size() - 8] ^ 1);
  EXPECT_THAT(message_for(packed), HasSubstr("incorrect data check"));
}

TEST_F(IdxTest, WrongMagicNumber) {
  EXPECT_THAT(message_for("not an IDX file at all"),
              AllOf(HasSubstr("the magic number"), HasSubstr("110 111 116 32")));
  std::string no_dimensions = bytes_;
  no_dimensions[3] = 0;
  EXPECT_THAT(message_for(no_dimensions), HasSubstr("the magic number"));
}

TEST_F(IdxTest, ElementsThatAreNoBytesAreNamed) {
  const auto with_type = [this](char type) {
    std::string bytes = bytes_;
    bytes[2] = type;
    return bytes;
  };
  EXPECT_THAT(message_for(with_type(0x09)), HasSubstr("int8 (type 9)"));
  EXPECT_THAT(message_for(with_type(0x0D)), HasSubstr("float32 (type 13)"));
  EXPECT_THAT(message_for(with_type(0x42)), HasSubstr("unknown ones (type 66)"));
}

std::string header(const std::string& sizes) {
  return std::string("\0\0\x08", 3) + static_cast<char>(sizes.size() / 4) + sizes;
}

TEST_F(IdxTest, AnAbsurdHeaderTakesNoMemory) {
  const std::string huge(12, '\xff');
  EXPECT_THAT(message_for(header(huge)), HasSubstr("at most 8589934592 bytes"));
  EXPECT_THAT(message_for(gzip(header(huge))), HasSubstr("at most 8589934592 bytes"));
  // No elements, but strides that no integer holds.
  EXPECT_THAT(message_for(header(std::string(4, '\0') + huge)),
              HasSubstr("at most 8589934592 bytes"));
  // 2 GiB are not absurd, but not in a file of some bytes either.
  const std::string two_gigabytes("\x80\0\0\0", 4);
  EXPECT_THAT(message_for(header(two_gigabytes)),
              AllOf(HasSubstr("2147483648 bytes of data"), HasSubstr("can hold 8")));
  EXPECT_THAT(message_for(gzip(header(two_gigabytes))), HasSubstr("2147483648 bytes of data"));
}

TEST_F(IdxTest, AGzipBombIsReadNoFurtherThanTheHeaderSays) {
  // 64 MiB of zeros in 64 KiB, behind a header that promises 100 bytes.
  const std::string bomb =
      gzip(header(std::string("\0\0\0\x64", 4)) + std::string(std::size_t{64} << 20, '\0'));
  ASSERT_LT(bomb.size(), 100'000U);
  EXPECT_THAT(message_for(bomb), AllOf(HasSubstr("100 bytes of data"), HasSubstr("more")));
}

TEST_F(IdxTest, TheLimitIsTheCallersChoice) {
  test::write_text(path_, bytes_);
  EXPECT_NO_THROW(read_idx(path_, 30));
  EXPECT_THROW(read_idx(path_, 29), FileError);
}

}  // namespace
}  // namespace semitone::zoo
