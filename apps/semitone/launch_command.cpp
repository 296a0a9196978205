#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/job.h"
#include "apps/semitone/launch_flags.h"
#include "apps/semitone/output.h"
#include "semitone/core/error.h"

#include <nlohmann/json.hpp>

#include <iostream>

namespace semitone::cli {
namespace {

using launch::LaunchOutcome;
using launch::LaunchResult;
using launch::WorkerStatus;
using nlohmann::ordered_json;

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

// What processes print need not be UTF-8.
std::string text_of(const ordered_json& object) {
  return object.dump(2, ' ', false, ordered_json::error_handler_t::replace);
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
  return text_of(object);
}

int run(const CLI::App& command, const LaunchFlags& flags) {
  const auto options = [&] {
    try {
      return options_of(flags, command);
    } catch (const FileError&) {
      throw;  // a token's file
    } catch (const Error& error) {
      throw UsageError(error);
    }
  }();
  require_json_writable(flags.json);
  if (const std::string reason = reason_for_processes(flags); !reason.empty())
    std::cerr << "[launch] " << reason << '\n';
  const LaunchResult result = [&] {
    try {
      return run_job(options);
    } catch (const Error& error) {
      // Otherwise a file of an earlier job would seem to be this one's.
      write_json(flags.json, text_of({{"outcome", "error"}, {"reason", error.what()}}));
      throw;
    }
  }();
  write_json(flags.json, flags.json.empty() ? "" : json_of(result));
  return result.exit_code();
}

}  // namespace

void add_launch_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "launch", "Run a program as several processes on one or more machines, like torchrun");
  const auto flags = add_launch_flags(command);
  command.callback(
      [&action, &command, flags] { action = [&command, flags] { return run(command, *flags); }; });
}

}  // namespace semitone::cli
