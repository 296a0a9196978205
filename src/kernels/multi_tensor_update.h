#pragma once

#include "src/kernels/updates.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <variant>
#include <vector>

// Optimizer steps over many parameters in one pass: updates.h for tensors. The references,
// ref::update of updates.h, are composed of ATen operators: any layout and device. fp64 parameters
// are computed in fp64, all others in fp32.
namespace semitone::kernels {

// One parameter of a step. All defined tensors are strided, on one device and of the parameter's
// shape. A parameter must not appear in a list twice, nor share memory with another.
struct Update {
  at::Tensor param;  // fp32, fp16, bf16 or fp64: written
  at::Tensor low;  // undefined, or int16: the lower halves of split masters, whose upper halves are
                   // param, a bf16 (rounding.h): written
  at::Tensor grad;  // any of these dtypes, whatever the parameter's
  at::Tensor copy;  // undefined, or receives the new parameter in its own dtype
  // The state tensors of the rule: fp32, or fp64 for an fp64 param. For Adam and SGD they may all
  // be bf16, rounded stochastically (updates.h). An element's number is then its position in the
  // parameter's memory, or without gaps if that has some.
  std::array<at::Tensor, 3> state;
  std::uint32_t seed = 0;  // for bf16 state: another one in each step
};

// Numbers of a rule of SGD, LAMB or NovoGrad that a device has computed from norms, instead of the
// host: fp64 scalars on the parameter's device. Lists of them have one element for each parameter.
// Undefined: the rule's.
struct ComputedNumbers {
  at::Tensor grad_scale = {};
  at::Tensor weight_decay = {};  // SGD
  at::Tensor trust_ratio = {};   // SGD
  at::Tensor correction = {};    // NovoGrad
  at::Tensor step_size = {};     // LAMB
};

// Rules of one kind, one for each parameter.
template <typename List>
struct RuleVectors;
template <typename... Rule>
struct RuleVectors<std::tuple<Rule...>> {
  using Variant = std::variant<std::vector<Rule>...>;
};
using Rules = RuleVectors<AllRules>::Variant;

// Writes each item's parameter, state and copy after a step by its rule. rules has one element per
// item. Results are the same for any number of threads.
void multi_tensor_update(std::span<const Update> items, const Rules& rules);

// The fp32 numbers that a bf16 tensor and its lower halves represent.
at::Tensor join_split_master(const at::Tensor& param, const at::Tensor& low);

// Writes fp32 numbers into a bf16 tensor and lower halves of the same shape.
void split_master(const at::Tensor& value, const at::Tensor& param, const at::Tensor& low);

}  // namespace semitone::kernels
