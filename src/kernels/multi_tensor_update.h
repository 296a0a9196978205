#pragma once

#include "src/kernels/updates.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

// Optimizer steps over many parameters in one pass: updates.h for tensors.
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

// Writes each item's parameter, state and copy after a step by its rule. rules has one element per
// item. Results are the same for any number of threads.
void multi_tensor_adam(std::span<const Update> items, std::span<const AdamRule> rules);
void multi_tensor_sgd(std::span<const Update> items, std::span<const SgdRule> rules);
void multi_tensor_novograd(std::span<const Update> items, std::span<const NovoGradRule> rules);
void multi_tensor_adagrad(std::span<const Update> items, std::span<const AdagradRule> rules);

// The rules of a step in which each parameter is updated independently.
using Rules = std::variant<std::vector<AdamRule>, std::vector<SgdRule>, std::vector<AdagradRule>>;
void multi_tensor_update(std::span<const Update> items, const Rules& rules);

// Such a step, repeated without the host: its rules and found_inf are read from the parameters'
// device when the kernels run, so that it can be captured in a CUDA graph.
class CapturableUpdate {
 public:
  explicit CapturableUpdate(c10::Device device);

  // Sends the rules of the next step to the device. The first call allocates memory there. Later
  // calls need the same number of rules of the same kind.
  void send(const Rules& rules);

  // Runs the step with the rules that were sent, or nothing if found_inf, of one fp32 element, is
  // not 0 (it may be undefined). Nothing is read back. Error unless all parameters are on the
  // device and are supported by its kernels: 16 bits or fp32, without gaps.
  void run(std::span<const Update> items, const at::Tensor& found_inf) const;

 private:
  c10::Device device_;
  at::Tensor rules_;  // bytes
                      // The functions for rules of the kind that was sent.
  void (*run_)(std::span<const Update> items, const at::Tensor& rules,
               const at::Tensor& found_inf) = nullptr;
};

// The two passes of LAMB. The first returns the norms of each parameter and its update, with one
// host read for each device other than the CPU.
struct LambNorms {
  double param = 0;
  double update = 0;
};
std::vector<LambNorms> multi_tensor_lamb_moments(std::span<const Update> items,
                                                 std::span<const LambRule> rules);
void multi_tensor_lamb_apply(std::span<const Update> items, std::span<const LambRule> rules);

// The fp32 numbers that a bf16 tensor and its lower halves represent.
at::Tensor join_split_master(const at::Tensor& param, const at::Tensor& low);

// Writes fp32 numbers into a bf16 tensor and lower halves of the same shape.
void split_master(const at::Tensor& value, const at::Tensor& param, const at::Tensor& low);

namespace ref {
// The reference implementations, composed of ATen operators: any layout and device. fp64 parameters
// are computed in fp64, all others in fp32.
void adam(const Update& item, const AdamRule& rule);
void sgd(const Update& item, const SgdRule& rule);
void novograd(const Update& item, const NovoGradRule& rule);
void adagrad(const Update& item, const AdagradRule& rule);
at::Tensor lamb_moments(const Update& item, const LambRule& rule);  // LambNorms, in fp64
void lamb_apply(const Update& item, const LambRule& rule);
}  // namespace ref

}  // namespace semitone::kernels
