#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <unordered_map>
#include <vector>

namespace semitone::amp::detail {

/// Sums of an optimizer's 16-bit gradients over backward passes, in fp32. The gradients of fp32
/// parameters and of whole masters need none: they are fp32 themselves.
class GradientSums {
 public:
  explicit GradientSums(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  GradientSums(const GradientSums&) = delete;
  GradientSums& operator=(const GradientSums&) = delete;
  GradientSums(GradientSums&&) = delete;
  GradientSums& operator=(GradientSums&&) = delete;
  /// After an exception: returns the sums. An exception while that is done is logged.
  ~GradientSums();

  /// Adds the gradients to their sums. They remain as zeros: a gradient that is still to be reduced
  /// over ranks, or that is a part of a larger tensor, keeps its place.
  void take();
  /// Adds the sums to the gradients, in fp32, and rounds. No sums are left. Returns a factor for a
  /// loss that is back-propagated next: 1, or NaN if one of these gradients is not finite. Undefined
  /// if there were no sums.
  at::Tensor put_back();

 private:
  struct Sum {
    at::Tensor parameter;
    at::Tensor value;
  };
  torch::optim::Optimizer* optimizer_;
  std::vector<Sum> sums_;
  std::unordered_map<c10::TensorImpl*, std::size_t> places_;  // of the parameters' sums
};

}  // namespace semitone::amp::detail
