#include "semitone/core/version.h"

#include <gtest/gtest.h>

#include <string>

namespace semitone::version_test {
namespace {

TEST(Version, OfTheHeadersIsThatOfTheLibrary) {
  EXPECT_EQ(version(), std::to_string(SEMITONE_VERSION_MAJOR) + "." +
                           std::to_string(SEMITONE_VERSION_MINOR) + "." +
                           std::to_string(SEMITONE_VERSION_PATCH));
}

// Each of the numbers decides only where those before it are equal.
TEST(Version, IsComparedNumberByNumber) {
  constexpr int kMajor = SEMITONE_VERSION_MAJOR;
  constexpr int kMinor = SEMITONE_VERSION_MINOR;
  constexpr int kPatch = SEMITONE_VERSION_PATCH;
  EXPECT_TRUE(SEMITONE_VERSION_AT_LEAST(kMajor, kMinor, kPatch));
  EXPECT_TRUE(SEMITONE_VERSION_AT_LEAST(kMajor - 1, kMinor + 1, kPatch + 1));
  EXPECT_TRUE(SEMITONE_VERSION_AT_LEAST(kMajor, kMinor - 1, kPatch + 1));
  EXPECT_FALSE(SEMITONE_VERSION_AT_LEAST(kMajor, kMinor, kPatch + 1));
  EXPECT_FALSE(SEMITONE_VERSION_AT_LEAST(kMajor, kMinor + 1, 0));
  EXPECT_FALSE(SEMITONE_VERSION_AT_LEAST(kMajor + 1, 0, 0));
#if !SEMITONE_VERSION_AT_LEAST(0, 1, 0)
  FAIL() << "the preprocessor gets another answer";
#endif
}

}  // namespace
}  // namespace semitone::version_test
