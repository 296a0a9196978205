#pragma once

// Internal interface: other rooms include this header.

#include <torch/optim/optimizer.h>

namespace semitone::optim {

// optimizer.step() of LibTorch's SGD, Adam or AdamW in one pass over parameters, gradients and the
// optimizer's own state. Parameters and state differ from LibTorch's by rounding only. As with other
// changes in place, autograd notices if a graph still needs a parameter's old value (LibTorch's SGD
// hides that).
//
// Returns false, with nothing changed, for any other class, also a derived one, and if a parameter
// with a gradient is not dense fp32 on a device with kernels, appears twice, shares memory with
// another, or has a gradient or state of another dtype, device or memory order; and if Adam's eps
// is 0. Then call optimizer.step().
bool step_in_one_pass(torch::optim::Optimizer& optimizer);

}  // namespace semitone::optim
