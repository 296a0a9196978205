#include "src/kernels/copy_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace semitone::kernels {
namespace {

TEST(CopyBytes, CopiesAnyNumberToAnyAddressAndNothingElse) {
  constexpr std::int64_t kRoom = 200;
  constexpr std::uint8_t kOther = 251;  // the values are below
  for (const std::int64_t count : {0, 1, 15, 64, 65, 1000, 3 << 20}) {
    std::vector<std::uint8_t> from(static_cast<std::size_t>(count + kRoom));
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint8_t>(i % 251);
    for (std::int64_t offset = 0; offset < 70; offset += count > 1000 ? 23 : 1) {
      SCOPED_TRACE(testing::Message() << count << " bytes, " << offset);
      std::vector<std::uint8_t> to(from.size(), kOther);
      copy_bytes(std::vector<BytesToCopy>{{from.data() + offset / 2, to.data() + offset, count}});
      const auto begin = to.begin() + offset;
      EXPECT_TRUE(std::equal(begin, begin + count, from.begin() + offset / 2));
      EXPECT_EQ(std::count(to.begin(), begin, kOther), offset);
      EXPECT_EQ(std::count(begin + count, to.end(), kOther), kRoom - offset);
    }
  }
}

TEST(CopyBytes, CopiesPartsOfAnySizes) {
  std::vector<std::vector<std::uint8_t>> from;
  std::uint8_t value = 0;
  for (const std::size_t count :
       std::vector<std::size_t>{0, 3, 70, 2'000'003, 0, 1, 1'500'000, 12'345}) {
    auto& bytes = from.emplace_back(count);
    for (std::uint8_t& byte : bytes) byte = value = static_cast<std::uint8_t>(5 * value + 3);
  }
  std::vector<std::vector<std::uint8_t>> to;
  std::vector<BytesToCopy> parts;
  to.reserve(from.size());
  for (const auto& bytes : from) {
    auto& copy = to.emplace_back(bytes.size());
    parts.push_back({bytes.data(), copy.data(), static_cast<std::int64_t>(bytes.size())});
  }
  copy_bytes(parts);
  EXPECT_EQ(to, from);
  copy_bytes({});
}

}  // namespace
}  // namespace semitone::kernels
