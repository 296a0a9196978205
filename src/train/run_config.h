#pragma once

#include "src/train/data_set.h"
#include "src/train/memory_format.h"
#include "src/train/train_options.h"

#include <map>
#include <string>

namespace semitone::train {

// The settings that must match on resume: flags of `semitone train` and their values.
using RunConfig = std::map<std::string, std::string>;

// The name of the data's checksum among them.
inline constexpr auto kDataChecksum = "data with the checksum";

// Opt level and dtype are not among them: checkpoint::Checkpoint converts. The number of processes
// may change too, if the examples per step stay: each step then trains on the same ones.
RunConfig run_config_of(const TrainOptions& options, MemoryFormat format, const DataSet& data);

}  // namespace semitone::train
