#include "src/amp/fast_kernels.h"

#include "src/nn/batch_norm.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>

namespace semitone::amp {
namespace {

using Arguments = std::span<const c10::IValue>;

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

bool is_suitable(const at::Tensor& input) {
  return input.is_cpu() && input.layout() == at::kStrided && input.is_floating_point() &&
         input.scalar_type() != at::kDouble && input.numel() > 0;
}

// Whether somebody else has a say in what happens to a tensor: SyncBatchNorm marks so the layers
// whose statistics go over several processes.
bool has_hooks(const at::Tensor& tensor) {
  if (!tensor.defined()) return false;
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || meta->cpp_hooks_list_ == nullptr) return false;
  return std::any_of(meta->cpp_hooks_list_->begin(), meta->cpp_hooks_list_->end(),
                     [](const auto& hook) { return static_cast<bool>(hook); });
}

std::optional<at::Tensor> batch_norm(Arguments arguments) {
  enum { kInput, kWeight, kBias, kRunningMean, kRunningVar, kTraining, kMomentum, kEps };
  const at::Tensor& input = arguments[kInput].toTensor();
  if (!arguments[kTraining].toBool() || !is_suitable(input) || input.dim() < 2 ||
      input.numel() <= input.size(1))
    return std::nullopt;
  const nn::BatchNorm layer{.where = "batch_norm",
                            .weight = tensor_or_none(arguments[kWeight]),
                            .bias = tensor_or_none(arguments[kBias]),
                            .running_mean = tensor_or_none(arguments[kRunningMean]),
                            .running_var = tensor_or_none(arguments[kRunningVar]),
                            .momentum = arguments[kMomentum].toDouble(),
                            .eps = arguments[kEps].toDouble()};
  if (has_hooks(layer.weight) || has_hooks(layer.running_mean)) return std::nullopt;
  return nn::batch_norm(input, layer);
}

constexpr std::array<FastKernel, 1> kKernels{{
    {.op = "batch_norm", .run = batch_norm},
}};

}  // namespace

std::span<const FastKernel> fast_kernels() {
  return kKernels;
}

const FastKernel* find_fast_kernel(std::string_view op) {
  const auto found = std::find_if(kKernels.begin(), kKernels.end(),
                                  [&](const FastKernel& kernel) { return kernel.op == op; });
  return found == kKernels.end() ? nullptr : &*found;
}

}  // namespace semitone::amp
