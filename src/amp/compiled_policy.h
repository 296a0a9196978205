#pragma once

#include "semitone/amp/cast_policy.h"
#include "src/core/native_kernels.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace semitone::amp {

// Operators that policies list get a small number each, the index into every policy's table.
using OpId = std::uint32_t;

// A parameter that a policy is bound to. Its address stays reserved while this lives, its memory
// does not.
struct BoundParameter {
  BoundParameter(const at::Tensor& parameter, bool keep);

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl;
  bool keep_fp32;
};

// A policy as the kernels read it, immutable: one array look-up for each operator call.
class CompiledPolicy {
 public:
  // as_libtorch: where LibTorch raises (fp16 beside bf16, banned operators) or lists operators that
  // this table does not know, its own kernels run. Only preset torch and its edits want that.
  CompiledPolicy(std::string name, CastTarget target, Emulation emulation, bool as_libtorch);

  std::string_view name() const { return name_; }
  c10::DeviceType device() const { return target_.device; }
  c10::ScalarType dtype() const { return target_.dtype; }

  // The same without rows: nothing is cast, 16-bit products are computed as they were. Its kernels
  // are installed if this one's are.
  std::shared_ptr<const CompiledPolicy> without_casts() const;
  // False for what without_casts() made.
  bool casts() const { return casts_; }

  bool as_libtorch() const { return as_libtorch_; }

  // The action for an operator; nothing where the policy does not list it.
  std::optional<CastAction> action(OpId op) const {
    return op < actions_.size() ? actions_[op] : std::nullopt;
  }
  // Whether an operator runs in fp32 that gets a parameter to be kept so.
  bool keeps_operator(OpId op) const { return op < kept_operators_.size() && kept_operators_[op]; }
  // Whether our own kernel of the operator is to run (fast_kernels.h).
  bool uses_fast_kernel(OpId op) const { return op < fast_.size() && fast_[op]; }
  // The matrix products that are computed in this 16-bit dtype; the others go through fp32.
  const NativeKernels& native(c10::ScalarType dtype) const {
    return dtype == at::kHalf ? native_fp16_ : native_bf16_;
  }
  bool emulates_any() const { return !native_fp16_.is_all() || !native_bf16_.is_all(); }
  // As on another processor, for tests: where Emulation leaves the choice to the machine.
  void set_native(const NativeKernels& fp16, const NativeKernels& bf16) {
    native_fp16_ = fp16;
    native_bf16_ = bf16;
  }
  // Whether fp32 that meets 16 bits in a matrix product, which LibTorch refuses, goes to 16 bits:
  // under a policy without rows, which is for models with 16-bit weights.
  bool lowers_mixed() const { return lowers_mixed_; }
  void lower_mixed() { lowers_mixed_ = true; }

  // Whether operators that LibTorch computes wrongly in 16 bits may go through fp32.
  bool repairs() const { return repairs_; }
  // Whether a tensor, or the tensor that it is a view of, is a parameter to be kept in fp32.
  bool keeps_fp32(const at::Tensor& tensor) const;
  // Whether the model of bind() has this parameter.
  bool is_parameter(const at::Tensor& tensor) const {
    return parameters_.count(tensor.unsafeGetTensorImpl()) > 0;
  }

  // Actions by OpId.
  using Actions = std::vector<std::optional<CastAction>>;
  void set_actions(Actions actions) { actions_ = std::move(actions); }
  void set_action(OpId op, CastAction action);
  void keep_operator(OpId op);
  void use_fast_kernel(OpId op);
  void add(const BoundParameter& parameter);

 private:
  std::string name_;
  CastTarget target_;
  Actions actions_;
  std::vector<bool> kept_operators_;
  std::vector<bool> fast_;
  std::unordered_map<const c10::TensorImpl*, BoundParameter> parameters_;
  bool casts_ = true;
  bool as_libtorch_;
  bool repairs_;
  bool lowers_mixed_ = false;
  NativeKernels native_fp16_;
  NativeKernels native_bf16_;
};

}  // namespace semitone::amp
