#include "semitone/core/error.h"
#include "semitone/launch/launcher.h"

#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/launch_flags.h"
#include "apps/semitone/output.h"
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <iostream>

namespace semitone::cli {
namespace {

using launch::LaunchOutcome;
using launch::LaunchResult;
using launch::WorkerStatus;
using nlohmann::ordered_json;

// Hands this process's signals to a launcher while it lives. What the process was started to ignore
// (SIGHUP under nohup) stays ignored.
class SignalsTo {
 public:
  explicit SignalsTo(launch::Launcher& launcher) {
    launcher_ = &launcher;
    // Ignored, it would hide how processes end.
    ::signal(SIGCHLD, SIG_DFL);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction action {};
      ::sigaction(signal, nullptr, &action);
      if (action.sa_handler == SIG_IGN) continue;
      action = {};
      action.sa_handler = [](int number) {
        if (launch::Launcher* const target = launcher_.load()) target->stop(number);
      };
      action.sa_flags = SA_RESTART;
      ::sigaction(signal, &action, nullptr);
    }
  }
  ~SignalsTo() { launcher_ = nullptr; }
  SignalsTo(const SignalsTo&) = delete;
  SignalsTo& operator=(const SignalsTo&) = delete;

 private:
  static inline std::atomic<launch::Launcher*> launcher_ = nullptr;
};

const char* name_of(LaunchOutcome outcome) {
  switch (outcome) {
    case LaunchOutcome::succeeded:
      return "succeeded";
    case LaunchOutcome::failed:
      return "failed";
    case LaunchOutcome::lost:
      return "lost";
    case LaunchOutcome::interrupted:
      break;
  }
  return "interrupted";
}

ordered_json json_of(const launch::ExitStatus& status) {
  return {{"code", status.code}, {"signal", status.signal}};
}

std::string json_of(const LaunchResult& result) {
  ordered_json object{{"outcome", name_of(result.outcome)}, {"reason", result.reason},
                      {"exit_code", result.exit_code()},    {"run_id", result.run_id},
                      {"restarts", result.restarts},        {"first_failure", nullptr},
                      {"workers", ordered_json::array()}};
  if (const auto& failure = result.first_failure) {
    object["first_failure"] = {{"rank", failure->rank}, {"local_rank", failure->local_rank},
                               {"node", failure->node}, {"host", failure->host},
                               {"pid", failure->pid},   {"status", json_of(failure->status)},
                               {"log", failure->log},   {"last_lines", failure->last_lines}};
  }
  for (const WorkerStatus& worker : result.workers) {
    object["workers"].push_back({{"rank", worker.rank},
                                 {"local_rank", worker.local_rank},
                                 {"pid", worker.pid},
                                 {"status", json_of(worker.status)},
                                 {"stopped", worker.stopped}});
  }
  // What processes print need not be UTF-8.
  return object.dump(2, ' ', false, ordered_json::error_handler_t::replace);
}

// Those of this node that failed after the first.
void print_others(const LaunchResult& result) {
  for (const WorkerStatus& worker : result.workers) {
    if (worker.stopped || worker.status.success() || worker.rank == result.first_failure->rank)
      continue;
    std::cerr << fmt::format("  rank {} failed after it: {}\n", worker.rank,
                             worker.status.to_string());
  }
}

void print(const LaunchResult& result) {
  if (result.outcome == LaunchOutcome::succeeded) return;
  if (result.outcome == LaunchOutcome::failed) {
    std::cerr << "[launch] " << result.first_failure->to_string() << '\n';
    print_others(result);
  } else {
    std::cerr << "[launch] " << result.reason << '\n';
  }
  if (result.restarts > 0)
    std::cerr << fmt::format("  after {} restart{}\n", result.restarts,
                             result.restarts == 1 ? "" : "s");
}

int run(const CLI::App& command, const LaunchFlags& flags) {
  const auto options = [&]() -> std::optional<launch::LaunchOptions> {
    try {
      return options_of(flags, command);
    } catch (const Error& error) {
      // The library's words for what the command line asks of it.
      std::cerr << error.what() << '\n';
      return std::nullopt;
    }
  }();
  if (!options.has_value()) return kUsage;
  require_json_writable(flags.json);
  launch::Launcher launcher(*options);
  if (const std::string reason = reason_for_processes(flags); !reason.empty())
    std::cerr << "[launch] " << reason << '\n';
  LaunchResult result;
  {
    const SignalsTo signals(launcher);
    result = launcher.run();
  }
  print(result);
  write_json(flags.json, flags.json.empty() ? "" : json_of(result));
  return result.exit_code();
}

}  // namespace

void add_launch_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "launch", "Run a program as several processes that train together, on one machine or more");
  const auto flags = add_launch_flags(command);
  command.callback(
      [&action, &command, flags] { action = [&command, flags] { return run(command, *flags); }; });
}

}  // namespace semitone::cli
