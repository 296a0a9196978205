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
  start_up,      // the scale had not grown yet and fell then, and the run had just begun
  after_growth,  // the scale had grown, and had not yet fallen to what it was before that
  unexpected,    // the gradients became larger, or are not finite at any scale
};

// A step in which a loss scale became larger.
struct ScaleGrowth {
  std::int64_t step = 0;
  bool began_anew = false;  // with another start of the program
  double from = 0;          // the scale before
};

struct ExplainedSkip {
  SkippedStep skip;
  std::int64_t loss_id = 0;  // the loss whose scale was in force
  SkipKind kind = SkipKind::unexpected;
  std::optional<double> scale_after;  // if the step lowered it
  std::optional<ScaleGrowth> growth;  // the last one, if the skip is after_growth

  // "the gradient of 'fc.weight' was not finite at loss scale 65536; the scale fell to 32768".
  std::string cause() const;
  // "step 312 was skipped: the gradient of …".
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
