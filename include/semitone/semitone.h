#pragma once

/// All that a training program needs. A program that uses one part compiles faster with
/// semitone/amp.h, checkpoint.h, nn.h, optim.h, parallel.h or report.h. Models and data sets (semitone/zoo/)
/// and the launcher (semitone/launch/) are included one by one.

#include "semitone/amp.h"
#include "semitone/checkpoint.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "semitone/core/keep_fp32.h"
#include "semitone/core/map_tensors.h"
#include "semitone/core/version.h"
#include "semitone/data/prefetch_loader.h"
#include "semitone/data/prefetch_options.h"
#include "semitone/nn.h"
#include "semitone/optim.h"
#include "semitone/parallel.h"
#include "semitone/report.h"
#include "semitone/weights/file.h"
#include "semitone/weights/state_dict.h"
