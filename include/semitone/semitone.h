#pragma once

/// All of Semitone. A program that uses one part may include that part's header instead, which
/// compiles faster.

#include "semitone/amp/autocast.h"
#include "semitone/amp/cast_policy.h"
#include "semitone/amp/functions.h"
#include "semitone/amp/grad_scaler.h"
#include "semitone/amp/loss_scale.h"
#include "semitone/amp/master_weights.h"
#include "semitone/amp/mixed_precision.h"
#include "semitone/amp/opt_level.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "semitone/core/keep_fp32.h"
#include "semitone/core/version.h"
#include "semitone/optim/clip_grad.h"
#include "semitone/optim/fused_adagrad.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_lamb.h"
#include "semitone/optim/fused_novograd.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/optim/larc.h"
