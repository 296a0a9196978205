#pragma once

#include <string_view>

namespace semitone::train {

// What a training does about a spike of its loss (amp::DivergenceGuard). With each of them, too
// many consecutive spikes are a divergence.
enum class OnSpike {
  none,         // only reports it to the observer
  skip,         // leaves out the batch; also one whose loss is inf or NaN
  lower_scale,  // takes the step, and lowers the loss scale
  // Takes the step. After a divergence of any kind it loads the newest checkpoint and goes on with
  // the next batch. It leaves out the batches since that checkpoint, with which it would diverge
  // again.
  rollback,
};

// "none", "skip", "lower-scale" and "rollback", as flags have them.
std::string_view name_of(OnSpike action);
// Error for anything else.
OnSpike parse_on_spike(std::string_view name);

}  // namespace semitone::train
