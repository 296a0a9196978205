#pragma once

#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_sgd.h"
#include "src/kernels/updates.h"

#include <cstdint>

// The kernels' rules for options.
namespace semitone::optim {

// @param step        the number of this step, from 1
// @param grad_scale  what gradients are multiplied by
kernels::AdamRule adam_rule(const FusedAdamOptions& options, std::int64_t step, double grad_scale);

// @param first  whether the momentum has no value yet
kernels::SgdRule sgd_rule(const FusedSGDOptions& options, bool first, double grad_scale);

}  // namespace semitone::optim
