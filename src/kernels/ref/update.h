#pragma once

#include "src/kernels/multi_tensor_update.h"

#include <ATen/core/Tensor.h>

#include <utility>

// What the references of all rules share.
namespace semitone::kernels::ref {

// A number of a rule: the host's, or, if that is defined, one that the device has computed
// (ComputedNumbers).
struct Number {
  Number(double host_) : host(host_) {}  // NOLINT(google-explicit-constructor)
  Number(double host_, at::Tensor computed_) : host(host_), computed(std::move(computed_)) {}
  double host;
  at::Tensor computed;
};

// The product in the tensor's dtype, to which the number is rounded first.
at::Tensor times(const at::Tensor& tensor, const Number& number);

// The gradient in the dtype of the computation, fp32 or fp64, times grad_scale.
at::Tensor scaled_grad(const Update& item, const Number& grad_scale);

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
