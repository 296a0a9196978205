#include "semitone/core/error.h"

#include <gtest/gtest.h>

#include <type_traits>
#include <utility>
#include <vector>

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

// An exception that throws while it is copied ends the program.
static_assert(std::is_nothrow_copy_constructible_v<Error>);
static_assert(std::is_nothrow_copy_constructible_v<FileError>);
static_assert(std::is_nothrow_copy_constructible_v<DivergedError>);
static_assert(std::is_nothrow_copy_constructible_v<CommError>);

TEST(Error, MovedFromIsWhole) {
  CommError from("a.b", "x", "y", "z", {3});
  const CommError to = std::move(from);
  EXPECT_EQ(to.component(), "a.b");
  EXPECT_EQ(to.ranks(), std::vector<int>{3});
  // NOLINTNEXTLINE(bugprone-use-after-move): what is tested
  EXPECT_EQ(from.component(), "a.b");
  EXPECT_EQ(from.ranks(), std::vector<int>{3});  // NOLINT(bugprone-use-after-move)
}

}  // namespace
}  // namespace semitone
