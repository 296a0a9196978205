#pragma once

#include "semitone/amp/tune.h"
#include "src/train/classifier.h"
#include "src/train/data_set.h"
#include "src/train/train_options.h"

namespace semitone::train {

// Runs amp::tune with trainings of train_classifier: in fp32 at O0, under policies at O1, each with
// the same seed. Their loss is the mean of the last quarter of their steps, and NaN if a training
// diverges. The losses of skipped steps count too.
//
// @param options  of the trainings. The opt level and the policy are set here. Error, before the
//                 first training, if max_steps or the number of steps is below 4, or if they set
//                 several processes, checkpoints or a file for weights.
// @param policy   the policy to begin with
amp::TuneResult tune_classifier(const ModelFactory& make_model, const DataSet& data,
                                const TrainOptions& options, const amp::CastPolicy& policy,
                                const amp::TuneOptions& tune_options);

}  // namespace semitone::train
