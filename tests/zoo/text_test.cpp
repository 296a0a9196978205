#include "semitone/zoo/text.h"

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
using ::testing::AllOf;
using ::testing::HasSubstr;

class TextTest : public ::testing::Test {
 protected:
  Text read(const std::string& bytes) {
    test::write_text(path_, bytes);
    return load_text(path_);
  }

  // The message of the FileError, which names the file.
  std::string message(std::int64_t max_bytes = 1 << 20) {
    try {
      load_text(path_, max_bytes);
    } catch (const FileError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("[zoo.text]"), HasSubstr(path_.string())));
      return error.what();
    }
    return "nothing was thrown";
  }

  test::TemporaryFolder folder_;
  std::filesystem::path path_ = folder_ / "some-file";
};

std::string message_of(const auto& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST_F(TextTest, TokensArePlacesInTheSortedVocabulary) {
  const Text text = read("hello\n");
  EXPECT_EQ(text.vocabulary, "\nehlo");
  EXPECT_EQ(text.classes(), 5);
  EXPECT_EQ(text.size(), 6);
  EXPECT_EQ(text.tokens.scalar_type(), torch::kByte);
  EXPECT_TRUE(torch::equal(text.tokens, torch::tensor({2, 1, 3, 3, 4, 0}, torch::kByte)));
}

TEST_F(TextTest, ReadsPlainAndGzippedFilesOfAnyBytes) {
  std::string bytes;
  for (int i = 0; i < 3 << 20; ++i) bytes += static_cast<char>(i % 1009 + i / 256);
  for (const std::string& file : {bytes, gzip(bytes), gzip(bytes.substr(0, 9)) + gzip(bytes)}) {
    const Text text = read(file);
    const std::string expected = text.size() > 3 << 20 ? bytes.substr(0, 9) + bytes : bytes;
    EXPECT_EQ(text.classes(), 256);
    EXPECT_TRUE(text.decode(text.tokens) == expected);
    EXPECT_TRUE(torch::equal(text.encode(expected), text.tokens));
  }
}

TEST_F(TextTest, DecodesIntegersOfAnyShape) {
  const Text text = read("abcd");
  EXPECT_EQ(text.decode(torch::tensor({{3, 1}, {0, 2}}, torch::kLong).t()), "dabc");
  EXPECT_EQ(text.decode(torch::tensor(2, torch::kInt)), "c");
  EXPECT_EQ(text.decode(torch::empty({0}, torch::kLong)), "");
  EXPECT_EQ(text.encode("").size(0), 0);
}

TEST_F(TextTest, NamesBytesAndTokensOutsideOfTheVocabulary) {
  const Text text = read("abc");
  EXPECT_THAT(message_of([&] { text.encode("abxy"); }), HasSubstr("got byte 120 at place 2"));
  EXPECT_THAT(message_of([&] { text.decode(torch::tensor({0, 3}, torch::kLong)); }),
              AllOf(HasSubstr("tokens from 0 to 2"), HasSubstr("got 3 at place 1")));
  EXPECT_THAT(message_of([&] { text.decode(torch::tensor({-1}, torch::kLong)); }),
              HasSubstr("got -1 at place 0"));
  EXPECT_THAT(message_of([&] { text.decode(torch::ones({2})); }), HasSubstr("got Float"));
  EXPECT_THAT(message_of([&] { text.decode(torch::Tensor()); }), HasSubstr("got no tensor"));
}

TEST_F(TextTest, LimitsTheSizeOfTheText) {
  for (const std::string& file : {std::string("12345678"), gzip("12345678")}) {
    test::write_text(path_, file);
    EXPECT_EQ(load_text(path_, 8).size(), 8);
    EXPECT_THAT(message(7), AllOf(HasSubstr("at most 7 bytes"), HasSubstr("max_bytes")));
  }
  EXPECT_THAT(message_of([&] { load_text(path_, 0); }), HasSubstr("max_bytes"));
}

// What has been read of a text does not tell how long it is.
TEST_F(TextTest, APlainTextThatIsTooLargeIsRefusedBeforeItIsRead) {
  test::write_text(path_, std::string(1000, 'a'));
  EXPECT_THAT(message(7), HasSubstr("got 1000 bytes — raise max_bytes"));
  test::write_text(path_, gzip(std::string(1000, 'a')));
  EXPECT_THAT(message(7), HasSubstr("got a longer one — raise max_bytes"));
}

// As those of /proc.
TEST_F(TextTest, SaysThatAFileDoesNotStateItsSize) {
  EXPECT_THAT(message_of([&] { load_text("/proc/self/status"); }), HasSubstr("read a copy"));
}

TEST_F(TextTest, RefusesFilesThatAreNoTexts) {
  EXPECT_THAT(message(), HasSubstr("got none"));
  test::write_text(path_, "");
  EXPECT_THAT(message(), HasSubstr("got an empty file"));
  test::write_text(path_, gzip(""));
  EXPECT_THAT(message(), HasSubstr("got an empty gzip stream"));
  const std::string packed = gzip(std::string(1000, 'a') + "b");
  test::write_text(path_, packed.substr(0, packed.size() - 5));
  EXPECT_THAT(message(), HasSubstr("ends early"));
  std::string changed = packed;
  changed[packed.size() - 8] = static_cast<char>(changed[packed.size() - 8] ^ 1);  // the checksum
  test::write_text(path_, changed);
  EXPECT_THAT(message(), HasSubstr("gzip stream"));
  path_ = folder_.path();
  EXPECT_THAT(message(), HasSubstr("got something else of that name"));
}

}  // namespace
}  // namespace semitone::zoo
