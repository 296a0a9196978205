#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace semitone::amp {

// The number of writes to a tensor, as autograd counts them; 0 for tensors of inference mode.
inline std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
}

// Detects that an optimizer has stepped by a direct call of optimizer.step(), which does not skip
// steps at an overflow. LibTorch's optimizers have no hooks, but the state of the parameters that
// had gradients reveals a step:
//
// - State that existed before is the same object, and its step count or its tensors' versions have
//   risen. optimizer.load() replaces the object.
// - New state counts one step, and the step has changed its parameter. The state of a file counts
//   any number of steps, and loading it changes no parameter. If a file of exactly one step is
//   loaded together with the model's weights, the two cannot be told apart.
//
// torch::optim::SGD without momentum has no state. It writes through tensor.data(), which does not
// change versions. While there is no state, one number of each CPU parameter is therefore compared:
// did they move against their gradients, without a new version? A program that changes weights
// itself changes versions, or moves along the gradients (sharpness-aware minimization).
class StepWatch {
 public:
  // Starts the observation. Gradients are where the optimizer reads them. Nothing is read from a
  // device.
  void start(torch::optim::Optimizer& optimizer);
  void stop();
  bool is_on() const { return on_; }

  // Whether the optimizer has stepped. Reads from a device only if a parameter on a GPU has new
  // state.
  bool has_stepped(const torch::optim::Optimizer& optimizer) const;
  // The same, but looks at optimizers with state only.
  bool state_shows_step(const torch::optim::Optimizer& optimizer) const;

 private:
  // A parameter that has a gradient, as it was at the start.
  struct Watched {
    at::Tensor parameter;
    std::uint32_t version = 0;
    const torch::optim::OptimizerParamState* state = nullptr;  // null: none
    std::int64_t progress = 0;                                 // that the state shows
    // Of one element, while there is no state: its place, value and gradient (in fp64). Undefined if
    // it cannot be looked at.
    at::Tensor place = {};
    at::Tensor before = {};
    at::Tensor grad = {};
  };

  static bool has_moved(const Watched& watched);
  bool moved_against_gradients(const torch::optim::Optimizer& optimizer) const;

  bool on_ = false;
  std::vector<Watched> watched_;
};

}  // namespace semitone::amp
