#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace semitone::amp {

// Detects that an optimizer has stepped by a direct call of optimizer.step(), which does not skip
// steps at an overflow. LibTorch's optimizers have no hooks, but their state reveals a step: it
// appears, and its step counts and its tensors' versions change.
//
// torch::optim::SGD without momentum has no state, and writes through tensor.data(), which does not
// change versions. While there is no state, a few numbers of each CPU parameter are therefore
// compared: did they move against their gradients, without a new version? A program that changes
// weights itself changes versions, or moves along the gradients (sharpness-aware minimization).
class StepWatch {
 public:
  // A number that changes when the optimizer steps, as far as its state shows it.
  static std::int64_t progress_of(const torch::optim::Optimizer& optimizer);

  // Starts the observation. Gradients are where the optimizer reads them.
  void start(torch::optim::Optimizer& optimizer);
  void stop();
  bool is_on() const { return on_; }

  bool has_stepped(torch::optim::Optimizer& optimizer) const;

 private:
  struct Sample {
    at::Tensor parameter;
    std::uint32_t version;
    at::Tensor places;  // of some elements
    at::Tensor before;  // their values and gradients, in fp64
    at::Tensor grad;
  };

  bool on_ = false;
  std::int64_t progress_ = 0;
  std::vector<Sample> samples_;
};

}  // namespace semitone::amp
