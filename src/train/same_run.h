#pragma once

#include "src/train/data_set.h"
#include "src/train/run_config.h"
#include "src/train/train_options.h"

namespace semitone::train {

// Error on all ranks of the options' group, with one difference, unless all of them train with the
// same settings and on the same data. Ranks with other settings would change the result without a
// trace, or wait forever for a step or a collective that another rank does not have.
//
// What may differ is not compared: paths, the index of a device, the number of threads, and what
// one rank decides for all.
//
// Collective: called before any other collective of the training. In a group of several ranks it
// reads all of the data for their checksum, about a gigabyte a second, unless the config has it.
// @param config  that of run_config_of
void require_same_run(const TrainOptions& options, const DataSet& data, const RunConfig& config);

}  // namespace semitone::train
