#include "src/core/nearest.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace semitone {
namespace {

TEST(Nearest, NamesAtMostThreeOfTheNearestFirst) {
  const std::vector<std::string> names{"train", "trains", "brain", "strain", "launch", "bench"};
  EXPECT_EQ(nearest("trian", names), "'train'");
  EXPECT_EQ(nearest("train", {"launch"}), "");
  EXPECT_EQ(nearest("trainx", names), "'train', 'trains' or 'brain'");
  EXPECT_EQ(nearest("launsh", names), "'launch'");
  EXPECT_EQ(nearest("", names), "");
  EXPECT_EQ(nearest("train", {}), "");
}

TEST(Nearest, LongNamesMayDifferMore) {
  EXPECT_EQ(nearest("--heartbeattimeuot", {"--heartbeat-timeout", "--tee"}),
            "'--heartbeat-timeout'");
  // Two letters, or a third of them.
  EXPECT_EQ(nearest("abc", {"axy"}), "'axy'");
  EXPECT_EQ(nearest("abc", {"xyz"}), "");
  EXPECT_EQ(nearest("abcdef", {"abxyzf"}), "");
}

}  // namespace
}  // namespace semitone
