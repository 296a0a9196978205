#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace semitone::amp {

// Tells whether an optimizer has stepped in the meantime, past those who skip its steps where
// gradients overflow. LibTorch's optimizers have no hooks; but what they keep tells: their state
// appears, its step counts and its tensors' versions move.
//
// torch::optim::SGD without momentum keeps nothing, and writes through tensor.data(), which leaves
// versions as they are. So while there is no state, a few numbers of each CPU parameter are looked
// at: did they move against their gradients, without a new version? A program that changes weights
// itself moves versions, or (as sharpness-aware minimization) goes along the gradients.
class StepWatch {
 public:
  // A number that differs once the optimizer has stepped, as far as its state tells.
  static std::int64_t progress_of(const torch::optim::Optimizer& optimizer);

  // From now on. Gradients are where the optimizer reads them.
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
