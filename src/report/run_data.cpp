#include "src/report/run_data.h"

#include "semitone/core/error.h"
#include "src/report/metrics_file.h"
#include "src/report/number_formats.h"
#include "src/report/record_file.h"
#include "src/report/samples_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <system_error>

namespace semitone::report {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMostRanks = std::numeric_limits<int>::max();

// Names of the directories in a directory that have a run, in order.
std::vector<std::string> runs_in(const fs::path& directory) {
  std::vector<std::string> runs;
  std::error_code ignored;
  for (fs::directory_iterator entry(directory, ignored); entry != fs::directory_iterator();
       entry.increment(ignored)) {
    if (fs::exists(entry->path() / "run.json", ignored))
      runs.push_back("'" + entry->path().string() + "'");
  }
  std::sort(runs.begin(), runs.end());
  return runs;
}

void require_run(const fs::path& directory) {
  std::error_code ignored;
  if (!fs::is_directory(directory, ignored)) {
    throw FileError(kPrecisionReport, "the directory of a run", "'" + directory.string() + "'",
                    "name the directory of a RunLog, or of semitone train --log-dir");
  }
  for (const char* const file : {"run.json", "metrics.csv", "samples.jsonl"}) {
    if (fs::exists(directory / file, ignored)) return;
  }
  const auto runs = runs_in(directory);
  throw FileError(kPrecisionReport, "the directory of a run",
                  fmt::format("'{}', which has no run.json", directory.string()),
                  runs.empty() ? "name the directory of a RunLog, or of semitone train --log-dir"
                               : fmt::format("name one of its runs: {}", fmt::join(runs, ", ")));
}

// Settings that are no texts are written by other programs.
std::map<std::string, std::string> read_config(const RecordFields& file) {
  std::map<std::string, std::string> config;
  if (!file.object("config").has_value()) return config;
  for (const auto& [key, value] : file.find("config")->items())
    config[key] = value.is_string() ? value.get<std::string>() : value.dump();
  return config;
}

void read_start(const RecordFields& file, RunInfo& info) {
  if (info.started.empty()) info.started = file.text("start_time");
  info.ended = file.text("end_time");
  info.outcome = file.text("outcome");
  info.reason = file.text("reason");
  info.config = read_config(file);
  ++info.starts;
  const auto environment = file.object("environment");
  if (!environment.has_value()) return;
  info.rank = environment->integer("rank", 0, kMostRanks);
  info.world_size = environment->integer("world_size", 1, kMostRanks, 1);
  info.processor = environment->text("processor");
  info.threads = environment->count("threads");
  info.cores = environment->count("cores");
  info.physical_cores = environment->count("physical_cores");
  info.all_cores = environment->count("all_cores");
  info.cpu_quota = environment->number("cpu_quota");
  info.local_world_size = environment->integer("local_world_size", 0, kMostRanks);
  info.semitone = environment->text("semitone");
  info.libtorch = environment->text("libtorch");
}

// Reads run.json, run-2.json …
RunInfo read_info(const fs::path& directory) {
  RunInfo info;
  info.directory = directory;
  for (int start = 1;; ++start) {
    const fs::path path = run_json_path(directory, start);
    const auto content = read_record(path);
    if (!content.has_value()) return info;
    const FilePlace place{path};
    const RecordJson json = parse_object(*content, place);
    read_start(RecordFields(json, place), info);
  }
}

std::string setting(const RunInfo& info, const char* name, const char* other_name) {
  for (const char* const key : {name, other_name}) {
    if (const auto found = info.config.find(key); found != info.config.end()) return found->second;
  }
  return {};
}

// A setting's value may be any text: "auto", or the name of another setting's dtype.
std::string dtype_of_settings(const RunInfo& info) {
  std::string dtype = python_dtype(setting(info, "dtype", "amp_dtype"));
  const bool is_known =
      sixteen_bit_format(dtype) != nullptr || dtype == "float32" || dtype == "float64";
  return is_known ? dtype : std::string();
}

// The floating dtype in which the operators of the forward and backward passes spent most time. A
// 16-bit one counts before fp32, in which autocast leaves a part of the operators, if more than a
// few operators have it.
std::string dtype_of_operators(const RunData& run) {
  constexpr double kLeastShare = 0.05;
  std::map<std::string, double> seconds;
  double all = 0;
  for (const auto& [step, sample] : run.samples) {
    for (const RunOperator& op : sample.operators) {
      if (op.pass != "forward" && op.pass != "backward") continue;
      seconds[op.dtype] += op.seconds;
      all += op.seconds;
    }
  }
  const char* const wide = seconds.contains("float32")   ? "float32"
                           : seconds.contains("float64") ? "float64"
                                                         : "";
  const char* const narrow = seconds["bfloat16"] > seconds["float16"] ? "bfloat16" : "float16";
  if (all > 0 && seconds[narrow] >= kLeastShare * all) return narrow;
  return wide;
}

bool computes_in_float8(const RunData& run) {
  return std::any_of(run.samples.begin(), run.samples.end(), [](const auto& sample) {
    const auto& operators = sample.second.operators;
    return std::any_of(operators.begin(), operators.end(),
                       [](const RunOperator& op) { return op.dtype.starts_with("float8"); });
  });
}

void find_steps(RunData& run) {
  for (const auto& [step, sample] : run.samples) run.see(step);
  for (const auto& [step, skipped] : run.skipped) run.see(step);
  for (const auto& [key, change] : run.scale_changes) run.see(key.first);
}

// What the last start says of the level and the dtype holds for samples of such starts only.
void leave_out_others(RunData& run) {
  run.samples_left_out =
      static_cast<std::int64_t>(std::erase_if(run.samples, [&](const auto& sample) {
        const std::string& settings = sample.second.settings;
        return !settings.empty() && settings != run.settings;
      }));
}

}  // namespace

std::int64_t RunParameter::numel() const {
  double product = 1;  // of sizes that are not checked
  for (const std::int64_t size : shape) product *= static_cast<double>(size);
  return product < 0x1p62 ? static_cast<std::int64_t>(product) : 0;
}

int RunSample::scale_exponent() const {
  return exponent_of_scale(loss_scale.value_or(1));
}

bool RunData::was_skipped(std::int64_t step) const {
  const auto [first, last] = skipped.equal_range(step);
  return std::any_of(first, last, [](const auto& one) { return one.second.is_exact; });
}

std::optional<double> RunData::last_scale(std::int64_t loss_id) const {
  const auto last =
      std::find_if(scale_changes.rbegin(), scale_changes.rend(),
                   [&](const auto& change) { return change.second.loss_id == loss_id; });
  return last == scale_changes.rend() ? std::nullopt : std::optional(last->second.after);
}

void RunData::see(std::int64_t step) {
  first_step = std::min(first_step.value_or(step), step);
  last_step = std::max(last_step, step);
}

std::int64_t RunData::steps() const {
  return first_step.has_value() ? last_step - *first_step + 1 : 0;
}

RunData read_run(const fs::path& directory) {
  require_run(directory);
  RunData run;
  run.info = read_info(directory);
  const auto restarts = read_samples(directory / "samples.jsonl", run);
  read_metrics(directory / "metrics.csv", restarts, run);
  find_steps(run);
  leave_out_others(run);
  run.info.opt_level = setting(run.info, "opt-level", "opt_level");
  run.info.dtype = dtype_of_settings(run.info);
  if (run.info.opt_level == "O0") run.info.dtype = "float32";
  if (run.info.dtype.empty()) run.info.dtype = dtype_of_operators(run);
  run.info.has_float8 = computes_in_float8(run);
  return run;
}

}  // namespace semitone::report
