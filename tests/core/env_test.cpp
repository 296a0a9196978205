#include "src/core/env.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>

namespace semitone::env {
namespace {

TEST(Env, UnsetAndEmptyAreNothing) {
  const Variable variable{"SEMITONE_TEST_VARIABLE", "for this test"};
  unsetenv(variable.name);
  EXPECT_EQ(get(variable), std::nullopt);
  setenv(variable.name, "", 1);
  EXPECT_EQ(get(variable), std::nullopt);
  setenv(variable.name, "value", 1);
  EXPECT_EQ(get(variable), "value");
  unsetenv(variable.name);
}

TEST(Env, TheListHasNamesAndMeaningsOnce) {
  std::set<std::string> names;
  for (const Variable& variable : all()) {
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name;
    EXPECT_NE(std::string(variable.meaning), "");
  }
  EXPECT_TRUE(names.count("SEMITONE_LOG_LEVEL"));
}

}  // namespace
}  // namespace semitone::env
