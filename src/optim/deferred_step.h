#pragma once

// Internal interface: other rooms include this header.

#include "semitone/optim/fused_optimizer.h"
#include "src/kernels/read_later.h"
#include "src/optim/fused_state.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

namespace semitone::optim {

// A step that the device skips or takes, and whose result the host learns later. Until then the
// optimizer assumes that it was taken. settle(), which every function of the optimizer calls that
// depends on the result, waits for it, and restores step counts and state if the step was skipped.
struct FusedOptimizer::Deferred {
  std::shared_ptr<kernels::ReadLater> found_inf;
  // The state of each parameter of the step as it was before. The tensors in it are those that the
  // device has left alone if it skipped.
  std::vector<std::pair<const c10::TensorImpl*, FusedState>> before;
};

class DeferredStep {
 public:
  // Whether all parameters of an optimizer are on one device that can decide a step.
  static bool is_supported(const FusedOptimizer& optimizer);

  // optimizer.step(how), unless found_inf, one fp32 element on the parameters' device, is not 0.
  // how has no found_inf of its own. Nothing is read.
  // @param result  tells the host what is in found_inf
  static void step(FusedOptimizer& optimizer, const FusedStep& how, const at::Tensor& found_inf,
                   std::shared_ptr<kernels::ReadLater> result);
};

}  // namespace semitone::optim
