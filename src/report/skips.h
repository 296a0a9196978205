#pragma once

#include "src/report/run_data.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace semitone::report {

inline constexpr std::size_t kMostSteps = 10;  // that a verdict lists

// Why a step was skipped. A dynamic loss scale finds the largest scale at which gradients do not
// overflow by trying: it begins high, and grows after many good steps. Both lead to skipped steps
// that cost a step and nothing else.
enum class SkipKind : std::uint8_t {
  start_up,      // the scale had not grown yet, and the run had just begun
  after_growth,  // the scale had grown since the skipped step before
  unexpected,    // the gradients became larger, or are not finite at any scale
};

struct ExplainedSkip {
  SkippedStep skip;
  SkipKind kind = SkipKind::unexpected;
  std::optional<double> scale_after;   // if the step changed it
  std::optional<std::int64_t> growth;  // the last step since the skip before in which it grew

  // "step 312 was skipped: gradient of 'fc.weight' not finite at loss scale 65536; the scale is
  // 32768 now".
  std::string to_string() const;
  // What this kind of skip means, as a sentence.
  std::string reason() const;
};

// The skipped steps in order.
std::vector<ExplainedSkip> explain_skips(const RunData& run);

// The parameters that they name, most frequent first; at most 10.
std::vector<std::string> parameters_of(const std::vector<ExplainedSkip>& skips);

// The last steps, at most kMostSteps.
std::vector<std::int64_t> steps_of(const std::vector<ExplainedSkip>& skips);

std::int64_t number_of(const std::vector<ExplainedSkip>& skips, SkipKind kind);

}  // namespace semitone::report
