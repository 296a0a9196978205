#pragma once

#include <sys/types.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// Starting other programs and watching them.
namespace semitone::launch {

/// Where what a process writes goes.
enum class Output {
  inherit,  ///< where this process's goes
  capture,  ///< into memory, for Process::wait
  discard,
};

/// What to run, and how.
///
///     const auto result = launch::run(launch::ProcessOptions("git").arguments({"log"})
///                                         .out(launch::Output::capture));
class ProcessOptions {
 public:
  /// @param program  a path, or a name to look up in PATH
  explicit ProcessOptions(std::filesystem::path program) : program_(std::move(program)) {}

  /// What comes after the program's name. No shell looks at it.
  ProcessOptions& arguments(std::vector<std::string> value);
  /// Adds a variable to this process's environment, or replaces it there, for the child.
  ProcessOptions& environment(std::string name, std::string value);
  /// Standard output and standard error. Default: inherit.
  ProcessOptions& out(Output value);
  ProcessOptions& err(Output value);
  /// What the child gets when the thread that started it ends. Default SIGTERM; a child that
  /// ignores that needs SIGKILL.
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

/// How a process ended.
struct ExitStatus {
  int code = 0;    ///< what it returned; 0 if a signal ended it
  int signal = 0;  ///< the signal that ended it; 0 if it ended by itself

  bool success() const { return code == 0 && signal == 0; }
  /// "exit code 3", "signal 9 (Killed)".
  std::string to_string() const;
};

/// What Process::wait returns.
struct Finished {
  ExitStatus status;
  std::string out;  ///< standard output, if captured
  std::string err;  ///< standard error, if captured
};

/// A running child process. It never outlives this one by accident: the destructor kills it, and so
/// does the end of this process, whatever ends it (ProcessOptions::death_signal). It stays in this
/// process's group, so Ctrl-C on a terminal reaches both.
class Process {
 public:
  /// Starts it. Error if the program cannot be run (not found, not executable), or the system has
  /// no room for another process. Keep the calling thread alive as long as the child is to live.
  explicit Process(const ProcessOptions& options);
  Process(Process&&) noexcept;
  Process& operator=(Process&&) = delete;
  /// Kills it (SIGKILL), unless it was waited for.
  ~Process();

  pid_t id() const;

  /// Sends a signal. Nothing happens if it was waited for.
  void send(int signal) const;

  /// Reads what is captured to its end, then waits. Call once.
  Finished wait();

 private:
  struct Child;
  std::unique_ptr<Child> child_;
};

/// Starts a process and waits for it.
Finished run(const ProcessOptions& options);

}  // namespace semitone::launch
