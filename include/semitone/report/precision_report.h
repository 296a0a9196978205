#pragma once

#include "semitone/report/verdict.h"

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace semitone::report {

/// Explains what the number formats did to a recorded training: which gradients vanish, why steps
/// were skipped, where the time goes, and what to change. `semitone report DIR` prints it.
///
///     const report::PrecisionReport report("runs/7");
///     std::cout << report.to_text();
///     report.write_html("runs/7/report.html");
///
/// It reads `run*.json`, `metrics.csv` and `samples.jsonl` of the directory of a RunLog (one rank's)
/// once, at its construction, also while the training still runs. Loss scales and skipped steps
/// are in every run's record; values, operators, times and memory only in that of a run with a
/// Recorder. The loss is the scalar `train/loss` or, without one, `loss`. A file that is missing
/// leaves its part of the report empty. A last line without its end is ignored, and of a step that
/// was trained twice the later training counts.
///
/// Values are counted by their binary exponent, so limits that are powers of two are exact.
/// Elsewhere the whole range between two powers of two counts as inside: float16's largest number is
/// 65504, and values up to 65536 count as fitting. A value rounds to zero below half of the format's
/// smallest number. Gradients are judged as the backward pass has them, multiplied by the loss
/// scale. A scale that is no power of two counts as the nearest one.
///
/// Times, parts of a step and operators leave out the first sampled step of each start, in which
/// LibTorch sets up its kernels, unless there is no other sample.
///
/// Copies share what was read. Objects can be used from several threads at once, except for
/// compare_with().
class PrecisionReport {
 public:
  /// Reads a run.
  /// @param directory  that of the RunLog: "runs/7", or "runs/7/rank-1"
  /// FileError if there is no run in it, if a file cannot be read, or for a damaged line.
  explicit PrecisionReport(const std::filesystem::path& directory);

  /// Adds another run, which the texts, the JSON and the page set beside this one. A second call
  /// replaces it. The other's own comparison is left out.
  void compare_with(const PrecisionReport& other);

  /// The findings, worst first. What could not be checked, for want of samples, is not among them.
  const std::vector<Verdict>& verdicts() const;

  /// The report for a terminal: the verdicts, skipped steps, and short tables. Ends with a newline.
  /// A control character of a name is a question mark in it.
  std::string to_text() const;

  /// The whole report as a JSON object, indented: docs/report.md describes it. Numbers that are not
  /// finite are null.
  std::string to_json() const;

  /// The report as one HTML page, with charts, that needs no other file and no network.
  std::string to_html() const;

  /// Writes to_html() to a file. FileError if that fails.
  void write_html(const std::filesystem::path& path) const;

 private:
  class Impl;

  std::shared_ptr<const Impl> impl_;
  std::shared_ptr<const Impl> other_;  // to compare with; or none
};

}  // namespace semitone::report
