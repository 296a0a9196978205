#pragma once

#include "semitone/autocast/cast_action.h"
#include "src/core/native_kernels.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace semitone::amp {

class Fp8State;

// Operators that policies list get a small number each, the index into every policy's table.
using OpId = std::uint32_t;

// A parameter that a policy is bound to. Its address stays reserved while this object exists; its
// memory does not.
struct BoundParameter {
  BoundParameter(const at::Tensor& parameter, bool keep);

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl;
  bool keep_fp32;
};

// A policy as the kernels read it, immutable: one array look-up for each operator call.
class CompiledPolicy {
 public:
  // as_libtorch: if LibTorch raises (fp16 with bf16, banned operators), or lists operators that
  // this table does not have, LibTorch's own kernels run. Only preset torch and its edits use this.
  CompiledPolicy(std::string name, CastTarget target, Emulation emulation, bool as_libtorch);

  std::string_view name() const { return name_; }
  c10::DeviceType device() const { return target_.device; }
  c10::ScalarType dtype() const { return target_.dtype; }

  // The same policy without rows: nothing is cast, and 16-bit products are computed as before. Its
  // kernels are installed if this policy's are.
  std::shared_ptr<const CompiledPolicy> without_casts() const;
  // False for a result of without_casts().
  bool casts() const { return casts_; }

  bool as_libtorch() const { return as_libtorch_; }

  // The action for an operator, or nothing if the policy does not list it.
  std::optional<CastAction> action(OpId op) const {
    return op < actions_.size() ? actions_[op] : std::nullopt;
  }
  // Whether an operator runs in fp32 if it gets a parameter that stays in fp32.
  bool keeps_operator(OpId op) const { return op < kept_operators_.size() && kept_operators_[op]; }
  // Whether Semitone's own kernel of the operator may run (fast_kernels.h).
  bool uses_fast_kernel(OpId op) const { return op < fast_.size() && fast_[op]; }
  // The matrix products that are computed in this 16-bit dtype; the others are emulated through
  // fp32.
  const NativeKernels& native(c10::ScalarType dtype) const {
    return dtype == at::kHalf ? native_fp16_ : native_bf16_;
  }
  bool emulates_any() const { return !native_fp16_.is_all() || !native_bf16_.is_all(); }
  // For tests: as on another processor, if Emulation depends on the machine.
  void set_native(const NativeKernels& fp16, const NativeKernels& bf16) {
    native_fp16_ = fp16;
    native_bf16_ = bf16;
  }
  // Whether an fp32 argument that meets 16 bits in a matrix product, which LibTorch refuses, is
  // cast to 16 bits. True for preset none and its edits, which models with 16-bit weights use.
  bool lowers_mixed() const { return lowers_mixed_; }
  void lower_mixed() { lowers_mixed_ = true; }

  // The scales of products in fp8; null: none is.
  const std::shared_ptr<Fp8State>& fp8() const { return fp8_; }
  void set_fp8(std::shared_ptr<Fp8State> state) { fp8_ = std::move(state); }

  // Whether operators that LibTorch computes wrongly in 16 bits may be computed through fp32.
  bool repairs() const { return repairs_; }
  // Whether a tensor, or the base of a view, is a parameter that stays in fp32.
  bool keeps_fp32(const at::Tensor& tensor) const;
  // Whether the model passed to bind() has this parameter.
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
  std::shared_ptr<Fp8State> fp8_;
};

}  // namespace semitone::amp
