#include "semitone/core/error.h"

#include <gtest/gtest.h>

namespace semitone {
namespace {

TEST(Error, SaysWhereExpectedGotAndRemedy) {
  const Error error("amp.initialize", "fp32 parameters", "bfloat16 'w'", "cast later");
  EXPECT_STREQ(error.what(),
               "[amp.initialize] expected fp32 parameters, got bfloat16 'w' — cast later");
  EXPECT_EQ(error.component(), "amp.initialize");
}

TEST(Error, LeavesOutAnEmptyRemedy) {
  EXPECT_STREQ(Error("a.b", "x", "y").what(), "[a.b] expected x, got y");
}

TEST(Error, KindsAreErrors) {
  EXPECT_THROW(throw FileError("a.b", "x", "y"), Error);
  EXPECT_THROW(throw DivergedError("a.b", "x", "y"), Error);
}

}  // namespace
}  // namespace semitone
