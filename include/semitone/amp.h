#pragma once

/// Mixed precision: amp::initialize and opt levels, autocast and cast policies, GradScaler. What
/// torch.amp and apex.amp have.

#include "semitone/amp/accumulate.h"
#include "semitone/amp/advice.h"
#include "semitone/amp/captured_step.h"
#include "semitone/amp/divergence_guard.h"
#include "semitone/amp/initialize.h"
#include "semitone/amp/mixed_precision.h"
#include "semitone/amp/opt_level.h"
#include "semitone/amp/scaled_loss.h"
#include "semitone/amp/tune.h"
#include "semitone/autocast/autocast.h"
#include "semitone/autocast/cast_action.h"
#include "semitone/autocast/cast_policy.h"
#include "semitone/autocast/cast_tree.h"
#include "semitone/autocast/fp8_options.h"
#include "semitone/autocast/fp8_scaling.h"
#include "semitone/autocast/functions.h"
#include "semitone/autocast/model.h"
#include "semitone/core/error.h"
#include "semitone/scaling/grad_scaler.h"
#include "semitone/scaling/loss_scale.h"
#include "semitone/scaling/loss_scaler.h"
#include "semitone/scaling/master_weights.h"
#include "semitone/scaling/step.h"
