#pragma once

#include "semitone/launch/exit_status.h"

#include <sys/types.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// Starts other programs and watches them.
namespace semitone::launch {

// Destination of a process's output.
enum class Output {
  inherit,  // this process's stream
  capture,  // memory, for Process::wait
  discard,
};

// The program to run, with its arguments and settings.
//
//     const auto result = launch::run(launch::ProcessOptions("git").arguments({"log"})
//                                         .out(launch::Output::capture));
class ProcessOptions {
 public:
  // @param program  a path, or a name to look up in PATH
  explicit ProcessOptions(std::filesystem::path program) : program_(std::move(program)) {}

  // Arguments of the program. They do not pass through a shell.
  ProcessOptions& arguments(std::vector<std::string> value);
  // Adds or replaces an environment variable of the child. The rest is inherited.
  ProcessOptions& environment(std::string name, std::string value);
  // Standard output and standard error. Default: inherit.
  ProcessOptions& out(Output value);
  ProcessOptions& err(Output value);
  // The signal that the child gets when the thread that started it ends. Default SIGTERM. For a
  // child that ignores SIGTERM use SIGKILL.
  ProcessOptions& death_signal(int value);

  const std::filesystem::path& program() const { return program_; }
  const std::vector<std::string>& arguments() const { return arguments_; }
  const std::vector<std::pair<std::string, std::string>>& environment() const {
    return environment_;
  }
  Output out() const { return out_; }
  Output err() const { return err_; }
  int death_signal() const { return death_signal_; }

 private:
  std::filesystem::path program_;
  std::vector<std::string> arguments_;
  std::vector<std::pair<std::string, std::string>> environment_;
  Output out_ = Output::inherit;
  Output err_ = Output::inherit;
  int death_signal_ = SIGTERM;
};

// What Process::wait returns.
struct ProcessResult {
  ExitStatus status;
  std::string out;  // standard output, if captured
  std::string err;  // standard error, if captured
};

// A running child process. It does not outlive this process by accident: the destructor kills it,
// and so does the end of this process, for any reason (ProcessOptions::death_signal). It stays in
// this process's group, so that Ctrl-C on a terminal reaches both.
class Process {
 public:
  // Starts the process. Error if the program cannot be run (not found, not executable) or the
  // system cannot create another process. The calling thread must live as long as the child is
  // needed.
  explicit Process(const ProcessOptions& options);
  Process(Process&&) noexcept;
  Process& operator=(Process&&) = delete;
  // Kills the process with SIGKILL, unless wait() has returned.
  ~Process();

  pid_t id() const;

  // Sends a signal. No effect after wait().
  void send(int signal) const;

  // Reads the captured output to its end, then waits for the process. Call it once.
  ProcessResult wait();

 private:
  struct Child;
  std::unique_ptr<Child> child_;
};

// Starts a process and waits for it.
ProcessResult run(const ProcessOptions& options);

}  // namespace semitone::launch
