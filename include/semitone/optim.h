#pragma once

/// The fused optimizers of semitone::optim, LARC, gradient clipping, learning rate schedulers, and
/// moving averages of weights.

#include "semitone/core/error.h"
#include "semitone/optim/clip_grad.h"
#include "semitone/optim/exponential_moving_average.h"
#include "semitone/optim/fused_adagrad.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_lamb.h"
#include "semitone/optim/fused_novograd.h"
#include "semitone/optim/fused_optimizer.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/optim/larc.h"
#include "semitone/optim/lr_schedule.h"
#include "semitone/optim/lr_scheduler.h"
