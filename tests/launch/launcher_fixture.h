#pragma once

#include "semitone/launch/launcher.h"
#include "src/launch/descriptor.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <future>
#include <map>
#include <string>
#include <system_error>

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

// Replaces this process's standard output by a pipe that holds 4 KiB until it is read. A test
// checks nothing before restore(), since failed checks are printed.
class UnreadConsole {
 public:
  UnreadConsole() {
    std::fflush(stdout);
    before_ = Descriptor(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
    Pipe pipe = make_pipe();
    ::fcntl(pipe.write.number(), F_SETPIPE_SZ, 4096);
    ::dup2(pipe.write.number(), STDOUT_FILENO);
    console_ = std::move(pipe.read);
  }
  ~UnreadConsole() { restore(); }
  UnreadConsole(const UnreadConsole&) = delete;
  UnreadConsole& operator=(const UnreadConsole&) = delete;

  // Everything that is written until restore(), from the beginning. Reads from now on.
  std::future<std::string> read() {
    return std::async(std::launch::async, [this] {
      std::string text;
      std::array<char, 4096> bytes{};
      for (ssize_t count = 0; (count = ::read(console_.number(), bytes.data(), bytes.size())) > 0;)
        text.append(bytes.data(), static_cast<std::size_t>(count));
      return text;
    });
  }

  void restore() {
    if (!before_.is_open()) return;
    std::fflush(stdout);
    ::dup2(before_.number(), STDOUT_FILENO);
    before_.close();
  }

 private:
  Descriptor before_;
  Descriptor console_;
};

// The lines "1", "2" … of a process of this rank, as the console gets them.
inline std::string relayed_numbers(int rank, int count) {
  std::string text;
  for (int i = 1; i <= count; ++i)
    text += "[rank" + std::to_string(rank) + "]: " + std::to_string(i) + "\n";
  return text;
}

// A process that was forked and does not call exec, as another thread of a program may do: it has a
// copy of each descriptor.
class ForkedProcess {
 public:
  ForkedProcess() : id_(::fork()) {
    if (id_ < 0) throw std::system_error(errno, std::generic_category(), "fork");
    if (id_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (true) ::pause();
  }
  ~ForkedProcess() {
    ::kill(id_, SIGKILL);
    ::waitpid(id_, nullptr, 0);
  }
  ForkedProcess(const ForkedProcess&) = delete;
  ForkedProcess& operator=(const ForkedProcess&) = delete;

 private:
  pid_t id_;
};

}  // namespace semitone::launch
