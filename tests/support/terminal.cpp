#include "tests/support/terminal.h"

#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

namespace semitone::test {

std::string on_terminal(const std::function<int()>& run, int columns) {
  int terminal = -1;
  const winsize size{24, static_cast<unsigned short>(columns), 0, 0};
  const pid_t id = ::forkpty(&terminal, nullptr, nullptr, &size);
  if (id == 0) ::_exit(run());
  EXPECT_GT(id, 0);
  std::string output;
  std::array<char, 4096> buffer{};
  // Ends with an error (EIO) where a pipe would end.
  for (ssize_t count = 0; (count = ::read(terminal, buffer.data(), buffer.size())) > 0;)
    output.append(buffer.data(), static_cast<std::size_t>(count));
  ::close(terminal);
  int status = 0;
  EXPECT_EQ(::waitpid(id, &status, 0), id);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << output;
  return output;
}

}  // namespace semitone::test
