#pragma once

#include "semitone/amp/mixed_precision.h"

namespace semitone::amp {

// Warns, once, if one of LibTorch's optimizers steps fp16 weights with an eps that fp16 rounds to
// 0. Where a gradient is 0, such an optimizer divides 0 by 0.
void warn_of_small_eps(const OptimizerRefs& optimizers);

}  // namespace semitone::amp
