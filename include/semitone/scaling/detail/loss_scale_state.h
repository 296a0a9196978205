#pragma once

#include "semitone/scaling/loss_scale.h"

#include <cstdint>

namespace semitone::amp::detail {

/// The current scale and counters.
struct LossScaleState {
  double scale = 65536.0;
  /// Good steps since the last overflow or growth; starts at -growth_delay. torch: _growth_tracker,
  /// Apex: unskipped, Paddle: good_steps.
  std::int64_t growth_tracker = 0;
  /// Overflows that count towards the next backoff. Apex: hysteresis - hysteresis_tracker, Paddle:
  /// bad_steps, DeepSpeed: hysteresis - cur_hysteresis, which stops at 1.
  std::int64_t overflows = 0;

  friend bool operator==(const LossScaleState&, const LossScaleState&) = default;
};

/// Returns the state before the first step. Error if the options contradict each other: a lower
/// bound above the upper bound, or an init_scale that scale_dtype cannot represent.
LossScaleState initial_loss_scale(const LossScaleOptions& options);

/// Returns the scale after a backoff: scale * backoff_factor, but not below min_scale.
double backed_off_scale(const LossScaleOptions& options, double scale);

/// Returns the state after a step. found_inf says whether a gradient was not finite.
/// growth_interval, and hysteresis with run_then_restart, are compared for equality: a counter
/// beyond its limit has no effect until it restarts, as in torch and Paddle. (LossScaler keeps its
/// counters within their limits.)
LossScaleState next_loss_scale(const LossScaleOptions& options, const LossScaleState& state,
                               bool found_inf);

}  // namespace semitone::amp::detail
