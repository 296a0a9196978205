#pragma once

#include "semitone/c/semitone.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
#include "semitone/scaling/loss_scale.h"

#include <cstddef>

namespace semitone::c {

// Applies options by name. Error for an unknown name, which suggests similar ones, and for a value
// that the option does not accept.
amp::LossScaleOptions with_options(const amp::LossScaleOptions& base, const SemitoneOption* options,
                                   std::size_t count, const char* function);
parallel::DistributedDataParallelOptions with_options(
    const parallel::DistributedDataParallelOptions& base, const SemitoneOption* options,
    std::size_t count, const char* function);

// The options of a preset: "semitone", "torch" …
amp::LossScaleOptions loss_scale_preset(const char* name, const char* function);

}  // namespace semitone::c
