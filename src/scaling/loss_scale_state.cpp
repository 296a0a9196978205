#include "semitone/scaling/detail/loss_scale_state.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace semitone::amp::detail {

LossScaleState initial_loss_scale(const LossScaleOptions& options) {
  if (options.min_scale() > options.max_scale()) {
    throw Error("amp.loss_scale", "min_scale of at most max_scale",
                fmt::format("{} and {}", options.min_scale(), options.max_scale()));
  }
  LossScaleState state;
  state.growth_tracker = -options.growth_delay();
  state.scale = options.rounded(std::min(options.init_scale(), options.max_scale()));
  if (!(state.scale > 0) || !std::isfinite(state.scale)) {
    throw Error("amp.loss_scale",
                "an init_scale that " + dtype_name(options.scale_dtype()) + " can hold",
                fmt::format("{}", options.init_scale()));
  }
  return state;
}

double backed_off_scale(const LossScaleOptions& options, double scale) {
  return std::max(options.rounded(options.min_scale()),
                  options.rounded(scale * options.backoff_factor()));
}

namespace {

// One more overflow.
void back_off(const LossScaleOptions& options, LossScaleState& state) {
  state.growth_tracker = -options.growth_delay();
  ++state.overflows;
  const bool restart = options.overflow_count() == OverflowCount::run_then_restart;
  if (restart ? state.overflows != options.hysteresis() : state.overflows < options.hysteresis()) {
    return;
  }
  state.scale = backed_off_scale(options, state.scale);
  if (restart) state.overflows = 0;
}

// One more good step.
void grow(const LossScaleOptions& options, LossScaleState& state) {
  if (options.overflow_count() != OverflowCount::since_growth) state.overflows = 0;
  ++state.growth_tracker;
  if (options.growth_interval() == 0 || state.growth_tracker != options.growth_interval()) return;
  const double grown = options.rounded(state.scale * options.growth_factor());
  if (std::isfinite(grown) || std::isinf(options.max_scale())) {
    state.scale = std::min(options.rounded(options.max_scale()), grown);
  }
  state.growth_tracker = 0;
  state.overflows = 0;
}

}  // namespace

LossScaleState next_loss_scale(const LossScaleOptions& options, const LossScaleState& state,
                               bool found_inf) {
  LossScaleState next = state;
  if (!options.dynamic()) {
    next.growth_tracker = found_inf ? -options.growth_delay() : state.growth_tracker + 1;
  } else if (found_inf) {
    back_off(options, next);
  } else {
    grow(options, next);
  }
  return next;
}

}  // namespace semitone::amp::detail
