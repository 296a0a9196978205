#pragma once

/// Checkpoints: everything that a training run needs to continue bit for bit, in one directory per
/// step.

#include "semitone/checkpoint/checkpoint.h"
#include "semitone/checkpoint/checkpoint_options.h"
#include "semitone/checkpoint/stop_signals.h"
#include "semitone/core/error.h"
