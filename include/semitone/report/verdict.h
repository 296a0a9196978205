#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::report {

/// How much a Verdict matters, worst first.
enum class Severity : std::uint8_t {
  problem,  ///< the training computes something else than intended: change it
  warning,  ///< precision or time is being lost
  advice,   ///< a possible improvement, or what holds for another dtype
  good,     ///< what was checked and found in order
};

/// "problem", "warning", "advice" or "good".
std::string_view name_of(Severity severity);

/// One finding of a PrecisionReport.
struct Verdict {
  Severity severity = Severity::good;
  std::string id;      ///< the rule: "underflow"; docs/report.md lists them
  std::string title;   ///< one sentence, with its figure
  std::string detail;  ///< why
  std::string remedy;  ///< what to change; empty if nothing should be
  std::optional<double> figure;
  std::string unit;                 ///< of the figure: "%", "x", "steps"; empty for a plain number
  std::vector<std::string> where;   ///< parameters, layers or operators, worst first; at most 10
  std::vector<std::int64_t> steps;  ///< the steps concerned, in order; at most 10
};

}  // namespace semitone::report
