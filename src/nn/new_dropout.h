#pragma once

// Internal interface: other rooms include this header.

#include "src/kernels/dropout.h"

namespace semitone::nn {

// Dropout with a stream of its own, from LibTorch's default generator for CPUs, which
// torch::manual_seed() sets. p is from 0 to 1.
kernels::Dropout new_dropout(double p);

}  // namespace semitone::nn
