#pragma once

#include "src/train/memory_format.h"
#include "src/train/train_options.h"

#include <cstdint>
#include <map>
#include <string>

namespace semitone::train {

// The settings that must match on resume: flags of `semitone train` and their values.
using RunConfig = std::map<std::string, std::string>;

// Opt level and dtype are not among them: checkpoint::Checkpoint converts. The number of processes
// may change too, if the images per step stay: each step then trains on the same images.
RunConfig run_config_of(const TrainOptions& options, MemoryFormat format,
                        std::int64_t training_images);

}  // namespace semitone::train
