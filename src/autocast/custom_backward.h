#pragma once

// Internal interface: other rooms include this header.

#include "semitone/autocast/autocast.h"

#include <ATen/core/Tensor.h>

#include <memory>

// The backward passes of torch::autograd::Functions whose forward ran in a region.
//
// Operators in such a forward are cast like all others: the result of a product with its fp32
// weight is 16-bit. Its backward runs where loss.backward() is called, usually outside of the
// region, and LibTorch refuses products of the 16-bit gradient with the saved fp32 weight.
// LibTorch's own nodes never have such products. If such a function was seen, ScaledLoss::backward
// therefore runs in a region that casts nothing but products of mixed dtypes, to 16 bits. With
// torch's backward() a function needs CustomForward and CustomBackward (autocast/functions.h).
namespace semitone::amp::custom_backward {

// Whether gradients were recorded where the innermost region of this thread began.
bool& begun_with_gradients();

// Called for operators that run in a region without recording gradients, while the region itself
// records them: those of a torch::autograd::Function. A block under NoGradGuard looks the same. For
// it the region of ScaledLoss::backward is unnecessary and costs 0.2 us a product.
void see_operator_without_gradients();

// The region for the backward pass of a loss, in force until it is destroyed. Null if no such
// function was seen.
std::unique_ptr<Autocast> region_for(const at::Tensor& loss);

}  // namespace semitone::amp::custom_backward
