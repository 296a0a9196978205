#pragma once

// Internal interface: other rooms include this header.

#include <torch/optim/optimizer.h>

namespace semitone::optim {

// optimizer.step() of LibTorch's SGD, Adam or AdamW in one pass over parameters, gradients and the
// optimizer's own state, which stays what LibTorch would have made of it but for rounding. Returns
// false, with nothing changed, for any other class, also a derived one, and where a parameter with
// a gradient is not dense fp32 or fp64, appears twice, or has a gradient of another dtype, device
// or layout: then the caller calls optimizer.step().
bool step_in_one_pass(torch::optim::Optimizer& optimizer);

}  // namespace semitone::optim
