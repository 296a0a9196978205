#pragma once

#include "semitone/amp/autocast.h"

#include <ATen/core/Tensor.h>

#include <memory>

// The backward passes of torch::autograd::Functions whose forward ran in a region.
//
// Operators in such a forward are cast like all others: a product of its fp32 weight comes out in 16
// bits. Its backward runs where loss.backward() is called, usually outside of the region, and LibTorch
// refuses products of the 16-bit gradient with the fp32 weight that it saved. LibTorch's own nodes
// never have such products. So where a function of this kind was seen, ScaledLoss::backward runs in a
// region that casts nothing but products of mixed dtypes, to 16 bits. With torch's backward() a
// function needs CustomForward and CustomBackward (amp/functions.h).
namespace semitone::amp::custom_backward {

// Whether the innermost region of this thread began where gradients are recorded.
bool& begun_with_gradients();

// Called for operators in regions that run without recording gradients: those of a
// torch::autograd::Function, where the region around it records them. A block under NoGradGuard looks
// the same; for it the region of ScaledLoss::backward is in vain and costs 0.2 us a product.
void see_operator_without_gradients();

// The region for the backward pass of a loss, in force until destroyed; null where no such function
// was seen.
std::unique_ptr<Autocast> region_for(const at::Tensor& loss);

}  // namespace semitone::amp::custom_backward
