#pragma once

#include "semitone/report/verdict.h"
#include "src/report/number_formats.h"
#include "src/report/run_data.h"
#include "src/report/summary.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::report {

// What the rules look at.
struct Evidence {
  const RunData& run;
  const Summary& summary;
  const NumberFormat* format;  // of the run's 16-bit dtype; nullptr for another dtype
  std::size_t format_index;    // in kNumberFormats
};

// A rule returns nothing if it does not apply, or finds nothing worth a line. docs/report.md lists
// the rules with their limits.
using Rule = std::optional<Verdict> (*)(const Evidence& evidence);

// verdicts_gradients.cpp
std::optional<Verdict> judge_underflow(const Evidence& evidence);
std::optional<Verdict> judge_subnormals(const Evidence& evidence);
std::optional<Verdict> judge_zero_gradients(const Evidence& evidence);
// verdicts_values.cpp
std::optional<Verdict> judge_weights(const Evidence& evidence);
std::optional<Verdict> judge_updates(const Evidence& evidence);
std::optional<Verdict> judge_outputs(const Evidence& evidence);
// verdicts_scale.cpp
std::optional<Verdict> judge_losses(const Evidence& evidence);
std::optional<Verdict> judge_skipped_steps(const Evidence& evidence);
std::optional<Verdict> judge_low_scale(const Evidence& evidence);
std::optional<Verdict> judge_growing_scale(const Evidence& evidence);
std::optional<Verdict> judge_first_scale(const Evidence& evidence);
// verdicts_speed.cpp
std::optional<Verdict> judge_wide_operators(const Evidence& evidence);
std::optional<Verdict> judge_emulation(const Evidence& evidence);
std::optional<Verdict> judge_casts(const Evidence& evidence);
std::optional<Verdict> judge_products(const Evidence& evidence);
std::optional<Verdict> judge_sizes(const Evidence& evidence);
std::optional<Verdict> judge_communication(const Evidence& evidence);
std::optional<Verdict> judge_data(const Evidence& evidence);
// verdicts_setup.cpp
std::optional<Verdict> judge_threads(const Evidence& evidence);
std::optional<Verdict> judge_eps(const Evidence& evidence);
std::optional<Verdict> judge_batch_norms(const Evidence& evidence);
std::optional<Verdict> judge_running_statistics(const Evidence& evidence);
// verdicts_formats.cpp
std::optional<Verdict> judge_formats(const Evidence& evidence);
std::optional<Verdict> judge_float8(const Evidence& evidence);
std::optional<Verdict> judge_samples(const Evidence& evidence);

// A share as a text: "12.5 %", "less than 0.01 %".
std::string percent(double share);

// Names with the figure that orders them.
using Ranked = std::vector<std::pair<double, std::string>>;

// The names, largest figure first; at most 10.
std::vector<std::string> worst_first(Ranked ranked);

// "'conv1.weight'", "'conv1.weight' and 3 others".
std::string first_and_others(const std::vector<std::string>& names, std::size_t all);

// A verdict with a figure, or with a share as its figure, in %. Rules fill the rest in place: GCC 12
// sees overflows where a struct with constant texts is moved.
std::optional<Verdict> number_verdict(Severity severity, std::string id, double figure,
                                      std::string unit);
std::optional<Verdict> share_verdict(Severity severity, std::string id, double share);

}  // namespace semitone::report
