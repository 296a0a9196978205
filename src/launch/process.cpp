#include "semitone/launch/process.h"

#include "semitone/core/error.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>

namespace semitone::launch {
namespace {

constexpr auto kWhere = "launch.process";

std::string reason_of(int number) {
  return std::error_code(number, std::generic_category()).message();
}

class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() { close(); }

  int number() const { return number_; }
  bool is_open() const { return number_ >= 0; }
  void close() {
    if (is_open()) ::close(std::exchange(number_, -1));
  }

 private:
  int number_;
};

struct Pipe {
  Descriptor read;
  Descriptor write;
};

// The same file under a number above those of the standard streams, which the child replaces: where
// this process has closed one of them, the system hands its number out again.
Descriptor above_standard_streams(Descriptor descriptor) {
  if (descriptor.number() > STDERR_FILENO) return descriptor;
  Descriptor copy(::fcntl(descriptor.number(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  if (!copy.is_open()) throw Error(kWhere, "a file descriptor from the system", reason_of(errno));
  return copy;
}

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error(kWhere, "a pipe from the system", reason_of(errno), "raise 'ulimit -n'");
  }
  Descriptor read(ends[0]);
  Descriptor write(ends[1]);
  return {above_standard_streams(std::move(read)), above_standard_streams(std::move(write))};
}

Descriptor open_null() {
  Descriptor null(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (!null.is_open()) throw Error(kWhere, "to open /dev/null", reason_of(errno));
  return above_standard_streams(std::move(null));
}

// argv or envp: pointers into strings that outlive it, and a null at the end.
std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (std::string& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> environment_of(const ProcessOptions& options) {
  const auto replaced = [&](std::string_view entry) {
    return std::any_of(
        options.environment().begin(), options.environment().end(),
        [&](const auto& variable) { return entry.substr(0, entry.find('=')) == variable.first; });
  };
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (!replaced(*entry)) result.emplace_back(*entry);
  }
  for (const auto& [name, value] : options.environment()) result.push_back(name + "=" + value);
  return result;
}

// One of the child's standard streams: what it is in the child, and what we keep of it.
struct Stream {
  Descriptor theirs;
  Descriptor ours;
};

Stream make_stream(Output output) {
  switch (output) {
    case Output::capture: {
      Pipe pipe = make_pipe();
      return {std::move(pipe.write), std::move(pipe.read)};
    }
    case Output::discard:
      return {open_null(), Descriptor()};
    case Output::inherit:
      break;
  }
  return {Descriptor(), Descriptor()};
}

// In the child between fork and exec, where only async-signal-safe calls are allowed: other threads
// of the parent may have held any lock.
[[noreturn]] void become(const char* program, char* const* arguments, char* const* environment,
                         const Stream& out, const Stream& err, int death_signal, pid_t parent,
                         int report) {
  const bool ready = (!out.theirs.is_open() || ::dup2(out.theirs.number(), STDOUT_FILENO) >= 0) &&
                     (!err.theirs.is_open() || ::dup2(err.theirs.number(), STDERR_FILENO) >= 0) &&
                     ::prctl(PR_SET_PDEATHSIG, death_signal) == 0;
  // The parent may have ended before the prctl: then no signal will come.
  if (ready && ::getppid() != parent) ::_exit(127);
  if (ready) ::execvpe(program, arguments, environment);
  const int reason = errno;
  const auto written = ::write(report, &reason, sizeof reason);
  static_cast<void>(written);
  ::_exit(127);
}

// Appends what is there; closes at the end.
void drain(Descriptor& from, std::string& into) {
  std::array<char, 1 << 16> buffer{};
  const auto count = ::read(from.number(), buffer.data(), buffer.size());
  if (count > 0) {
    into.append(buffer.data(), static_cast<std::size_t>(count));
  } else if (count == 0 || errno != EINTR) {
    from.close();
  }
}

ExitStatus wait_for(pid_t id) {
  int status = 0;
  while (::waitpid(id, &status, 0) < 0) {
    if (errno != EINTR) throw Error(kWhere, "to wait for the child", reason_of(errno));
  }
  if (WIFSIGNALED(status)) return {0, WTERMSIG(status)};
  return {WEXITSTATUS(status), 0};
}

}  // namespace

ProcessOptions& ProcessOptions::arguments(std::vector<std::string> value) {
  arguments_ = std::move(value);
  return *this;
}

ProcessOptions& ProcessOptions::environment(std::string name, std::string value) {
  if (name.empty() || name.find('=') != std::string::npos) {
    throw Error(kWhere, "a name for an environment variable", "'" + name + "'");
  }
  std::erase_if(environment_, [&](const auto& variable) { return variable.first == name; });
  environment_.emplace_back(std::move(name), std::move(value));
  return *this;
}

ProcessOptions& ProcessOptions::out(Output value) {
  out_ = value;
  return *this;
}

ProcessOptions& ProcessOptions::err(Output value) {
  err_ = value;
  return *this;
}

ProcessOptions& ProcessOptions::death_signal(int value) {
  death_signal_ = value;
  return *this;
}

std::string ExitStatus::to_string() const {
  if (signal == 0) return "exit code " + std::to_string(code);
  return "signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
}

struct Process::Child {
  pid_t id;
  Descriptor out;
  Descriptor err;
};

Process::Process(const ProcessOptions& options) {
  std::vector<std::string> words{options.program().string()};
  words.insert(words.end(), options.arguments().begin(), options.arguments().end());
  std::vector<std::string> variables = environment_of(options);
  const std::vector<char*> arguments = pointers(words);
  const std::vector<char*> environment = pointers(variables);
  Stream out = make_stream(options.out());
  Stream err = make_stream(options.err());
  // Closed by a successful exec; else it brings the reason.
  Pipe report = make_pipe();

  const pid_t parent = ::getpid();
  const pid_t id = ::fork();
  if (id == 0) {
    become(arguments.front(), arguments.data(), environment.data(), out, err,
           options.death_signal(), parent, report.write.number());
  }
  if (id < 0) throw Error(kWhere, "another process from the system", reason_of(errno));
  report.write.close();
  std::string reason;
  while (report.read.is_open()) drain(report.read, reason);
  if (!reason.empty()) {
    wait_for(id);
    int number = 0;
    std::memcpy(&number, reason.data(), std::min(reason.size(), sizeof number));
    throw Error(kWhere, "to run '" + options.program().string() + "'", reason_of(number));
  }
  child_ = std::make_unique<Child>(Child{id, std::move(out.ours), std::move(err.ours)});
}

Process::Process(Process&&) noexcept = default;

Process::~Process() {
  if (child_ == nullptr) return;
  ::kill(child_->id, SIGKILL);
  int status = 0;
  while (::waitpid(child_->id, &status, 0) < 0 && errno == EINTR) {
  }
}

pid_t Process::id() const {
  return child_ == nullptr ? -1 : child_->id;
}

void Process::send(int signal) const {
  if (child_ != nullptr) ::kill(child_->id, signal);
}

Finished Process::wait() {
  if (child_ == nullptr) throw Error(kWhere, "a process that was not waited for yet", "another");
  Finished result;
  while (child_->out.is_open() || child_->err.is_open()) {
    // poll() passes over negative descriptors.
    std::array<pollfd, 2> ready{pollfd{child_->out.number(), POLLIN, 0},
                                pollfd{child_->err.number(), POLLIN, 0}};
    if (::poll(ready.data(), ready.size(), -1) < 0) {
      if (errno == EINTR) continue;
      throw Error(kWhere, "to read what the child writes", reason_of(errno));
    }
    if (ready[0].revents != 0) drain(child_->out, result.out);
    if (ready[1].revents != 0) drain(child_->err, result.err);
  }
  result.status = wait_for(child_->id);
  child_.reset();
  return result;
}

Finished run(const ProcessOptions& options) {
  return Process(options).wait();
}

}  // namespace semitone::launch
