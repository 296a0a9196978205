#pragma once

#include "src/kernels/multi_tensor_update.h"

#include <ATen/core/Tensor.h>

// What the references of all rules share.
namespace semitone::kernels::ref {

// The gradient in the dtype of the computation, fp32 or fp64, times grad_scale.
at::Tensor scaled_grad(const Update& item, double grad_scale);

// The parameter in the dtype of the computation.
at::Tensor wide_param(const Update& item);

// Writes a new parameter, and its copy.
void write(const Update& item, const at::Tensor& value);

// updates.h's flush_subnormal, of fp32 or fp64.
at::Tensor flush_subnormal(const at::Tensor& value);

// average * beta + added, flushed. accumulate stores it in the average.
at::Tensor accumulated(const at::Tensor& average, double beta, const at::Tensor& added);
void accumulate(const at::Tensor& average, double beta, const at::Tensor& added);

// Writes state 0 and, if defined, state 1; bf16 state is rounded stochastically.
void store_moments(const Update& item, const at::Tensor& first, const at::Tensor& second = {});

// The correctly rounded root: in fp32, LibTorch's own (MKL's) is off by a unit in one of 160
// numbers.
at::Tensor root(const at::Tensor& value);

}  // namespace semitone::kernels::ref
