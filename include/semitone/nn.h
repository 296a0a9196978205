#pragma once

/// The fused layers and functions of semitone::nn, and those that save memory by computing twice.

#include "semitone/core/error.h"
#include "semitone/nn/fused_batch_norm.h"
#include "semitone/nn/fused_cross_entropy.h"
#include "semitone/nn/fused_dense.h"
#include "semitone/nn/fused_dropout.h"
#include "semitone/nn/fused_gelu.h"
#include "semitone/nn/fused_layer_norm.h"
#include "semitone/nn/fused_rms_norm.h"
#include "semitone/recompute/checkpoint.h"
#include "semitone/recompute/linear_cross_entropy.h"
