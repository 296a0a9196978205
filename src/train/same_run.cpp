#include "src/train/same_run.h"

#include "semitone/amp/opt_level.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::train {
namespace {

// The directories' names may differ: rank 0 finds the checkpoint for all.
const char* resume_setting(const TrainOptions& options) {
  if (options.resume_auto()) return "auto";
  return options.resume_from().empty() ? "not set" : "set";
}

// What all ranks must have in common, by name: more than what must match on resume.
RunConfig settings_of_run(const TrainOptions& options, const DataSet& data,
                          const RunConfig& config) {
  const auto text = [](const auto& value) { return fmt::format("{}", value); };
  RunConfig all = config;
  all["--opt-level"] = amp::name_of(options.opt_level());
  if (options.opt_level() != amp::OptLevel::O0)
    all["--dtype"] = dtype_name(training_dtype(options));
  all["--epochs"] = text(options.epochs());
  all["--max-steps"] = text(options.max_steps());
  all["--max-loss-ratio"] = text(options.divergence_guard().max_loss_ratio());
  all["--on-spike"] = name_of(options.on_spike());
  all["--check-nonfinite"] = text(options.check_nonfinite());
  all["--checkpoint-dir"] = options.checkpoint_dir().empty() ? "not set" : "set";
  all["--save-every"] = options.save_every().is_set() ? describe(options.save_every()) : "not set";
  all["--resume"] = resume_setting(options);
  all["data"] = data.kind.name;
  all[fmt::format("test {}", data.kind.examples)] = text(data.test->size());
  if (!all.contains(kDataChecksum) && data.checksum) all[kDataChecksum] = data.checksum();
  return all;
}

// A line with name and value for each.
std::string lines_of_settings(const RunConfig& settings) {
  std::string lines;
  for (const auto& [name, value] : settings) {
    std::string line = name + '\t' + value;
    std::ranges::replace(line, '\n', ' ');  // between the parts of --policy
    lines += line + '\n';
  }
  return lines;
}

RunConfig settings_in_lines(const std::string& lines) {
  RunConfig settings;
  std::istringstream stream(lines);
  for (std::string line; std::getline(stream, line);) {
    const auto tab = line.find('\t');
    settings[line.substr(0, tab)] = line.substr(tab + 1);
  }
  return settings;
}

// The name of a setting in which two ranks differ, of which there is one. If only one rank has a
// setting, another one is often the reason, as --optimizer is for --momentum. If checksums differ
// and numbers of examples too, the numbers say more.
std::string differing_setting(const RunConfig& one, const RunConfig& other) {
  std::string differing;
  std::string missing;
  for (const auto& [name, value] : one) {
    const auto found = other.find(name);
    if (found == other.end()) {
      missing = name;
    } else if (found->second != value && (differing.empty() || differing == kDataChecksum)) {
      differing = name;
    }
  }
  if (!differing.empty()) return differing;
  for (const auto& [name, value] : other) {
    if (!one.contains(name)) missing = name;
  }
  return missing;
}

// "--lr 0.05 on rank 0".
std::string setting_of_rank(const RunConfig& settings, const std::string& name, std::size_t rank) {
  const auto found = settings.find(name);
  return fmt::format("{} {} on rank {}", name, found == settings.end() ? "not set" : found->second,
                     rank);
}

}  // namespace

void require_same_run(const TrainOptions& options, const DataSet& data, const RunConfig& config) {
  if (options.group().size() == 1) return;
  const std::vector<std::string> all =
      options.group().all_gather(lines_of_settings(settings_of_run(options, data, config)));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    const RunConfig first = settings_in_lines(all.front());
    const RunConfig other = settings_in_lines(all[rank]);
    const std::string name = differing_setting(first, other);
    throw Error("train.trainer", "the same settings and data on all ranks",
                fmt::format("{} and {}", setting_of_rank(first, name, 0),
                            setting_of_rank(other, name, rank)),
                "give all processes the same flags and the same data");
  }
}

}  // namespace semitone::train
