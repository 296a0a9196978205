#include "apps/semitone/train_record.h"

#include "apps/semitone/train_config.h"
#include "semitone/core/dtype.h"
#include "semitone/launch/exit_status.h"
#include "semitone/report/run_log.h"
#include "src/core/env.h"
#include "src/core/log.h"
#include "src/report/run_files.h"
#include "src/report/run_json.h"
#include "src/train/run_recorder.h"

#include <c10/util/Exception.h>

#include <exception>
#include <filesystem>
#include <string>
#include <string_view>

namespace semitone::cli {
namespace {

// A launcher restarts processes with the first command line, also if the first start was refused
// because the record is another job's. So a restart counts only if this job made the last start.
bool is_restart(const std::string& log_dir) {
  return (env::get(env::kRestartCount).value_or("0") != "0" ||
          env::get(env::kAttempt).value_or("0") != "0") &&
         report::job_of_last_start(log_dir) == env::get(env::kRunId).value_or("");
}

bool may_continue(const train::TrainOptions& options, const std::string& log_dir) {
  return options.resume_auto() || !options.resume_from().empty() || is_restart(log_dir);
}

report::RunLogOptions log_options(const CLI::App& command, const train::TrainOptions& options,
                                  const std::string& log_dir) {
  auto config = config_of(command);
  // These may be "all" and "auto" on the command line.
  config["opt-level"] = amp::name_of(options.opt_level());
  config["dtype"] = dtype_name(train::training_dtype(options));
  config["device"] = options.device().str();
  config["batch-size"] = std::to_string(options.batch_size());
  return report::RunLogOptions()
      .config(config)
      .rank(options.group().rank())
      .world_size(options.group().size())
      .append(may_continue(options, log_dir))
      .ignore_write_errors(true);
}

// An error of the record does not replace that of the training.
void record_failure(report::RunLog& log, std::string_view reason) {
  try {
    log.close(report::Outcome::failed, reason);
  } catch (const std::exception& error) {
    semitone::log()->warn("{}", error.what());
  }
}

}  // namespace

void require_recordable(const TrainFlags& flags) {
  if (flags.log_dir.empty()) return;
  const auto levels = flags.levels();
  for (const amp::OptLevel level : levels) {
    const std::string directory = log_dir_of(flags.log_dir, level, levels.size() > 1);
    if (!report::has_values(directory) || may_continue(flags.options, directory)) continue;
    throw FileError(kTrain, "a --log-dir without a run", "'" + directory + "', which has one",
                    "choose another directory, or continue the run with --resume");
  }
}

std::string log_dir_of(const std::string& log_dir, amp::OptLevel level, bool is_one_of_all) {
  if (!is_one_of_all) return log_dir;
  return (std::filesystem::path(log_dir) / amp::name_of(level)).string();
}

train::TrainResult train_recorded(const TrainFlags& flags, const CLI::App& command,
                                  const train::TrainOptions& options, train::Observer& observer,
                                  const TrainWith& train) {
  if (flags.log_dir.empty()) return train(observer);
  const std::string log_dir =
      log_dir_of(flags.log_dir, options.opt_level(), flags.levels().size() > 1);
  report::RunLog log(log_dir, log_options(command, options, log_dir));
  train::RunRecorder recorder(log, observer, flags.record_every);
  try {
    const train::TrainResult result = train(recorder);
    if (!result.not_saved.empty()) {
      record_failure(log, result.not_saved.front());
    } else if (result.stop_signal == 0) {
      log.close();
    } else {
      log.close(report::Outcome::stopped, launch::ExitStatus{0, result.stop_signal}.to_string());
    }
    return result;
  } catch (const c10::Error& error) {
    record_failure(log, error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    record_failure(log, error.what());
    throw;
  }
}

}  // namespace semitone::cli
