#include "src/core/utf8.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string_view>

namespace semitone::utf8_test {
namespace {

// The bounds of RFC 3629: the least and the greatest character of each length, and what is beside them.
TEST(Utf8, EachLengthHasItsBounds) {
  for (const std::string_view text :
       {"", "a", "\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
        "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf", "a\xc3\xa9z"}) {
    EXPECT_TRUE(is_utf8(text)) << text;
  }
  for (const std::string_view text :
       {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xed\xbf\xbf",
        "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"}) {
    EXPECT_FALSE(is_utf8(text)) << text;
  }
}

TEST(Utf8, CharactersThatAreCutOffAreNone) {
  for (const std::string_view text : {"\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"}) {
    EXPECT_EQ(utf8_length(text), text.size());
    for (std::size_t size = 1; size < text.size(); ++size) {
      EXPECT_EQ(utf8_length(text.substr(0, size)), 0);
    }
  }
  EXPECT_FALSE(is_utf8("a\xe2\x82z"));
  EXPECT_FALSE(is_utf8("\xe2(\xa1"));
  EXPECT_EQ(utf8_length("\xc3\xa9\xff"), 2);
  EXPECT_EQ(utf8_length(std::string_view("\0a", 2)), 1);
}

}  // namespace
}  // namespace semitone::utf8_test
