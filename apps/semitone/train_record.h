#pragma once

#include "apps/semitone/train_flags.h"
#include "src/train/trainer.h"

#include <functional>

namespace semitone::cli {

// Trains with an observer.
using TrainWith = std::function<train::TrainResult(train::Observer& observer)>;

// Trains, with a record of it in the directory of --log-dir, if there is one.
//
// @param observer  receives the events of the training too
train::TrainResult train_recorded(const TrainFlags& flags, const CLI::App& command,
                                  const train::TrainOptions& options, train::Observer& observer,
                                  const TrainWith& train);

// FileError if a record of --log-dir could not begin, since there is one of another run. Looks at
// directories only, so that this is reported before data are read.
void require_recordable(const TrainFlags& flags);

// The directory of a level's record: with several levels, each has a directory in that of --log-dir.
std::string log_dir_of(const std::string& log_dir, amp::OptLevel level, bool is_one_of_all);

}  // namespace semitone::cli
