#include "src/core/usable_cores.h"

#include <gtest/gtest.h>

#include <cmath>
#include <optional>

namespace semitone {
namespace {

TEST(CpuQuota, IsTheCoresWorthOfTime) {
  EXPECT_EQ(parse_cpu_quota("150000 100000\n"), 1.5);
  EXPECT_EQ(parse_cpu_quota("max 100000\n"), std::nullopt);
  EXPECT_EQ(parse_cpu_quota("-1 100000"), std::nullopt);
  EXPECT_EQ(parse_cpu_quota("1000 0"), std::nullopt);
  EXPECT_EQ(parse_cpu_quota(" "), std::nullopt);
}

TEST(Cores, OfTheMachineAreNoFewerThanTheUsableOnes) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_GE(all_cores(), usable_cores());
  EXPECT_GE(granted_cores(), 1);
  EXPECT_LE(granted_cores(), usable_cores());
  EXPECT_LE(granted_cores(), std::ceil(cpu_quota().value_or(usable_cores())));
}

}  // namespace
}  // namespace semitone
