#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <array>
#include <cstdint>
#include <optional>

namespace semitone::optim {

// The state of a fused optimizer for one parameter.
struct FusedState : torch::optim::OptimizerCloneableParamState<FusedState> {
  std::int64_t step = 0;              // steps that this parameter took part in
  std::array<at::Tensor, 3> tensors;  // see FusedOptimizer::state_of
  // The lower halves of split masters (FusedAdamOptions::split_master): int16, of the parameter's
  // shape.
  at::Tensor master_low;
  // LibTorch's map has the state by the parameter's address. While this lives, a parameter made
  // after the old one was freed does not get the same address, and with it this state.
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> address;

  void hold_address_of(const at::Tensor& parameter) {
    if (!address.has_value() || address->_unsafe_get_target() != parameter.unsafeGetTensorImpl())
      address.emplace(parameter.getIntrusivePtr());
  }

  // Stores tensors by position, not by name. These functions are for amp::MasterWeights, which
  // widens 16-bit state to fp32 by saving and loading it. FusedOptimizer::save() writes files.
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

}  // namespace semitone::optim
