#include "src/launch/process.h"

#include "semitone/core/error.h"
#include "src/launch/child.h"
#include "src/launch/descriptor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace semitone::launch {
namespace {

constexpr auto kProcess = "launch.process";

// One of the child's standard streams: the child's end, and this process's.
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
      return {open_null(O_WRONLY), Descriptor()};
    case Output::inherit:
      break;
  }
  return {Descriptor(), Descriptor()};
}

// Appends the available data; closes at the end.
void drain(Descriptor& from, std::string& into) {
  std::array<char, 1 << 16> buffer{};
  const auto count = ::read(from.number(), buffer.data(), buffer.size());
  if (count > 0) {
    into.append(buffer.data(), static_cast<std::size_t>(count));
  } else if (count == 0 || errno != EINTR) {
    from.close();
  }
}

}  // namespace

ProcessOptions& ProcessOptions::arguments(std::vector<std::string> value) {
  arguments_ = std::move(value);
  return *this;
}

ProcessOptions& ProcessOptions::environment(std::string name, std::string value) {
  if (name.empty() || name.find('=') != std::string::npos) {
    throw Error(kProcess, "a name for an environment variable", "'" + name + "'");
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

struct Process::Child {
  pid_t id;
  Descriptor out;
  Descriptor err;
};

Process::Process(const ProcessOptions& options) {
  Stream out = make_stream(options.out());
  Stream err = make_stream(options.err());
  ChildOptions child;
  child.argv = {options.program().string()};
  child.argv.insert(child.argv.end(), options.arguments().begin(), options.arguments().end());
  child.environment = options.environment();
  child.out = out.theirs.number();
  child.err = err.theirs.number();
  child.death_signal = options.death_signal();
  child_ =
      std::make_unique<Child>(Child{start_child(child), std::move(out.ours), std::move(err.ours)});
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

ProcessResult Process::wait() {
  if (child_ == nullptr) throw Error(kProcess, "one call of wait() for each process", "another");
  ProcessResult result;
  while (child_->out.is_open() || child_->err.is_open()) {
    // poll() ignores negative descriptors.
    std::array<pollfd, 2> ready{pollfd{child_->out.number(), POLLIN, 0},
                                pollfd{child_->err.number(), POLLIN, 0}};
    if (::poll(ready.data(), ready.size(), -1) < 0) {
      if (errno == EINTR) continue;
      throw Error(kProcess, "to read what the child writes", reason_of(errno));
    }
    if (ready[0].revents != 0) drain(child_->out, result.out);
    if (ready[1].revents != 0) drain(child_->err, result.err);
  }
  result.status = wait_for(child_->id);
  child_.reset();
  return result;
}

ProcessResult run(const ProcessOptions& options) {
  return Process(options).wait();
}

}  // namespace semitone::launch
