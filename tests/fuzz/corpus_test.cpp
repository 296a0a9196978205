// Every target with the inputs in its folder of corpus/, without a fuzzer.

#include "tests/fuzz/targets.h"
#include "tests/support/temporary_folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string>

namespace semitone::fuzz {
namespace {

// The bytes of NAME.hex, which may have spaces, line ends and comments: "#" up to the end of a line.
std::string from_hex(const std::string& text) {
  std::string bytes;
  std::string digits;
  bool is_comment = false;
  for (const char letter : text) {
    if (letter == '#' || letter == '\n') is_comment = letter == '#';
    if (is_comment || std::isxdigit(static_cast<unsigned char>(letter)) == 0) continue;
    digits += letter;
    if (digits.size() < 2) continue;
    bytes += static_cast<char>(std::stoi(digits, nullptr, 16));
    digits.clear();
  }
  EXPECT_EQ(digits, "") << "half a byte";
  return bytes;
}

class Corpus : public ::testing::TestWithParam<Target> {};

TEST_P(Corpus, IsAcceptedOrRefused) {
  const auto folder =
      std::filesystem::path(SEMITONE_SOURCE_DIR) / "tests/fuzz/corpus" / GetParam().name;
  int inputs = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    const std::string text = test::read_text(file.path());
    const std::string input = file.path().extension() == ".hex" ? from_hex(text) : text;
    EXPECT_NO_THROW(GetParam().run(input)) << file.path();
    // Also cut off, and with a changed byte.
    for (std::size_t i = 0; i < std::min<std::size_t>(input.size(), 500); ++i) {
      std::string changed = input;
      changed[i] = static_cast<char>(changed[i] ^ 0x55);
      EXPECT_NO_THROW(GetParam().run(input.substr(0, i))) << file.path() << " up to byte " << i;
      EXPECT_NO_THROW(GetParam().run(changed)) << file.path() << " with another byte " << i;
    }
    ++inputs;
  }
  EXPECT_GT(inputs, 0) << folder;
}

INSTANTIATE_TEST_SUITE_P(Fuzz, Corpus, ::testing::ValuesIn(targets().begin(), targets().end()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace semitone::fuzz
