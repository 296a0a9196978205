#include "src/report/crc32c.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace semitone::report {
namespace {

TEST(Crc32c, HasTheValuesOfRfc3720) {
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  std::string ascending;
  for (char value = 0; value < 32; ++value) ascending += value;
  EXPECT_EQ(crc32c(ascending), 0x46dd794eU);
  EXPECT_EQ(crc32c(std::string(ascending.rbegin(), ascending.rend())), 0x113fdb5cU);
}

TEST(Crc32c, HasTheCheckValueOfALengthThatIsNotAMultipleOfFour) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(""), 0U);
}

// The length of a record of 24 bytes.
TEST(Crc32c, IsMaskedAsInTensorFlowsRecords) {
  const std::string length("\x18\0\0\0\0\0\0\0", 8);
  EXPECT_EQ(masked_crc32c(length), 0x224b7fa3U);
}

}  // namespace
}  // namespace semitone::report
