#pragma once

#include "semitone/launch/launcher.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <fstream>
#include <map>
#include <string>

namespace semitone::launch {

// Jobs of real processes, most of them shells.
class LauncherTest : public ::testing::Test {
 protected:
  // A shell script. $DIR is the test's folder.
  LaunchOptions shell(const std::string& script, int processes = 1) const {
    return LaunchOptions("/bin/sh")
        .arguments({"-c", "DIR='" + folder_.path().string() + "'\n" + script})
        .nproc_per_node(processes);
  }

  // The variables that a process wrote with `env`.
  std::map<std::string, std::string> environment_of(const std::string& file) const {
    std::ifstream stream(folder_ / file);
    std::map<std::string, std::string> result;
    for (std::string line; std::getline(stream, line);) {
      const auto equals = line.find('=');
      result[line.substr(0, equals)] = line.substr(equals + 1);
    }
    return result;
  }

  // Checks that no process is left whose id the workers wrote to the file.
  void expect_all_gone(const std::string& file, std::size_t count) const {
    const auto ids = test::ids_in(folder_ / file);
    EXPECT_EQ(ids.size(), count);
    for (const pid_t id : ids) EXPECT_FALSE(test::is_running(id)) << id;
  }

  test::TemporaryFolder folder_;
};

inline LaunchResult run(const LaunchOptions& options) {
  return Launcher(options).run();
}

}  // namespace semitone::launch
