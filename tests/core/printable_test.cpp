#include "src/core/printable.h"

#include "semitone/core/error.h"

#include <gmock/gmock.h>

#include <string>

namespace semitone::printable_test {
namespace {

TEST(Printable, ReplacesWhatChangesATerminal) {
  EXPECT_EQ(printable("a\x1b[31mb\x7f\tc\nd"), "a?[31mb??c?d");
  EXPECT_EQ(printable("a\xc2\x9b"
                      "1mb"),
            "a?1mb");  // U+009B
  EXPECT_EQ(printable("a\xe2\x80\xae"
                      "b\xe2\x81\xa6"),
            "a?b?");  // U+202E, U+2066
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a?b");
}

TEST(Printable, KeepsOtherTexts) {
  // U+00A0, U+2013, and bytes that are not UTF-8, also at the end.
  for (const std::string text :
       {"", "layer.0", "\xc2\xa0", "\xe2\x80\x93", "\xff\xfe", "a\xc2", "a\xe2\x80"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, KeepsLinesOnRequest) {
  EXPECT_EQ(printable_lines("a\nb\r\x1b\n"), "a\nb??\n");
}

TEST(Printable, MessagesOfErrorsAreSo) {
  const Error error("weights.load", "'w'", "'w\x1b[2J'\nand others", "load another file");
  EXPECT_STREQ(error.what(),
               "[weights.load] expected 'w', got 'w?[2J'\nand others — load another file");
}

}  // namespace
}  // namespace semitone::printable_test
