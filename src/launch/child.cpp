#include "src/launch/child.h"

#include "semitone/core/error.h"
#include "src/launch/descriptor.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

namespace semitone::launch {
namespace {

constexpr auto kChild = "launch.process";

// argv or envp: pointers to strings that outlive it, terminated by null.
std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (std::string& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> merged_environment(const Variables& added) {
  const auto replaced = [&](std::string_view entry) {
    return std::any_of(added.begin(), added.end(), [&](const auto& variable) {
      return entry.substr(0, entry.find('=')) == variable.first;
    });
  };
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (!replaced(*entry)) result.emplace_back(*entry);
  }
  for (const auto& [name, value] : added) result.push_back(name + "=" + value);
  return result;
}

bool redirect(int stream, int descriptor) {
  return descriptor < 0 || ::dup2(descriptor, stream) >= 0;
}

// The child's group is not in the terminal's foreground. Under `stty tostop` SIGTTOU would stop a
// child that writes to the terminal, silently. What is ignored stays so in exec.
bool lead_own_group() {
  return ::setpgid(0, 0) == 0 && ::signal(SIGTTOU, SIG_IGN) != SIG_ERR;
}

// Runs in the child between fork and exec. Only async-signal-safe calls are allowed, since other
// threads of the parent may have held any lock.
[[noreturn]] void exec_child(const ChildOptions& child, char* const* argv, char* const* environment,
                             pid_t parent, int report) {
  sigset_t none;
  ::sigemptyset(&none);
  const bool ready = (!child.own_group || lead_own_group()) && redirect(STDIN_FILENO, child.in) &&
                     redirect(STDOUT_FILENO, child.out) && redirect(STDERR_FILENO, child.err) &&
                     ::sigprocmask(SIG_SETMASK, &none, nullptr) == 0 &&
                     ::signal(SIGPIPE, SIG_DFL) != SIG_ERR &&  // what is ignored stays so in exec
                     ::prctl(PR_SET_PDEATHSIG, child.death_signal) == 0;
  // The parent may have ended before the prctl, so that no signal will arrive.
  if (ready && ::getppid() != parent) ::_exit(127);
  if (ready) {
    if (child.registry >= 0) send_number(child.registry, ::getpid());
    ::execvpe(argv[0], argv, environment);
  }
  const int reason = errno;
  if (ready && child.registry >= 0) send_number(child.registry, -::getpid());
  const auto written = ::write(report, &reason, sizeof reason);
  static_cast<void>(written);
  ::_exit(127);
}

// The child's report before exec: an errno, or nothing.
int read_report(Descriptor from) {
  int reason = 0;
  ssize_t count = 0;
  do {
    count = ::read(from.number(), &reason, sizeof reason);
  } while (count < 0 && errno == EINTR);
  return count == static_cast<ssize_t>(sizeof reason) ? reason : 0;
}

}  // namespace

pid_t start_child(const ChildOptions& child) {
  std::vector<std::string> argv = child.argv;
  std::vector<std::string> variables = merged_environment(child.environment);
  const std::vector<char*> arguments = pointers(argv);
  const std::vector<char*> environment = pointers(variables);
  // A successful exec closes it; otherwise it carries the errno.
  Pipe report = make_pipe();

  const pid_t parent = ::getpid();
  const pid_t id = ::fork();
  if (id == 0)
    exec_child(child, arguments.data(), environment.data(), parent, report.write.number());
  if (id < 0) throw Error(kChild, "another process from the system", reason_of(errno));
  report.write.close();
  if (const int reason = read_report(std::move(report.read)); reason != 0) {
    wait_for(id);
    throw Error(kChild, "to run '" + child.argv.front() + "'", reason_of(reason));
  }
  return id;
}

ExitStatus exit_status(int status) {
  if (WIFSIGNALED(status)) return {0, WTERMSIG(status)};
  return {WEXITSTATUS(status), 0};
}

ExitStatus wait_for(pid_t id) {
  int status = 0;
  while (::waitpid(id, &status, 0) < 0) {
    if (errno != EINTR) throw Error(kChild, "to wait for the child", reason_of(errno));
  }
  return exit_status(status);
}

}  // namespace semitone::launch
