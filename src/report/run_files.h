#pragma once

#include "semitone/report/run_log.h"
#include "src/report/append_file.h"
#include "src/report/run_json.h"
#include "src/report/tensorboard_events.h"

#include <nlohmann/json_fwd.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

// Internal interface: other rooms include this header.
namespace semitone::report {

// Whether a run in a directory has values. A start that failed has left none, and the next one may
// take its place.
bool has_values(const std::filesystem::path& directory);

// The time now, for a Moment.
double wall_time();

// The files of a run, for one thread at a time. What is added waits in memory for flush().
class RunFiles {
 public:
  RunFiles(const std::filesystem::path& directory, const RunLogOptions& options, std::int64_t rank,
           std::int64_t world_size);

  // Whether the directory had a run already.
  bool continues() const { return continues_; }

  void add_scalar(const Moment& when, std::string_view name, double value);
  void add_text(const Moment& when, std::string_view name, std::string_view text);
  void add_histogram(const Moment& when, std::string_view name, const Histogram& values);
  // Adds a line to samples.jsonl: the step, the time, the kind, and the other fields. Bytes that are
  // not UTF-8 are replaced, numbers that are not finite are null.
  void add_sample(const Moment& when, std::string_view kind, const nlohmann::ordered_json& fields);
  // The training continues at a step, perhaps an earlier one.
  void add_restart(const Moment& when);

  std::size_t waiting() const;
  // Writes all files. FileError if one of them cannot be written; the others are.
  void flush();
  // Adds how the run ended to run.json.
  void end(Outcome outcome, std::string_view reason) { json_.end(outcome, reason); }

 private:
  AppendFile metrics_;
  AppendFile texts_;
  AppendFile samples_;
  bool continues_;
  AppendFile events_;
  RunJson json_;
  std::string config_;              // in Markdown
  RunLogOptions::Config settings_;  // those that decide what samples mean
};

}  // namespace semitone::report
