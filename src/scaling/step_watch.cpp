#include "src/scaling/step_watch.h"

#include "semitone/optim/fused_optimizer.h"
#include "src/optim/fused_state.h"
#include "src/scaling/gradients.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

namespace semitone::amp {
namespace {

// A number that grows with each step, as far as a parameter's state shows it.
std::int64_t steps_in(const torch::optim::OptimizerParamState& state) {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  if (const auto* fused = dynamic_cast<const optim::FusedState*>(&state)) return fused->step;
  if (const auto* adam = dynamic_cast<const AdamParamState*>(&state)) return adam->step();
  if (const auto* adam_w = dynamic_cast<const AdamWParamState*>(&state)) return adam_w->step();
  if (const auto* adagrad = dynamic_cast<const AdagradParamState*>(&state)) return adagrad->step();
  if (const auto* rms = dynamic_cast<const RMSpropParamState*>(&state)) return rms->step();
  if (const auto* sgd = dynamic_cast<const SGDParamState*>(&state)) {
    const at::Tensor& buffer = sgd->momentum_buffer();
    if (buffer.defined() && !buffer.is_inference()) return buffer._version();
  }
  return 0;
}

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
}

at::Tensor elements(const at::Tensor& tensor, const at::Tensor& places) {
  return tensor.detach().reshape(-1).index_select(0, places).to(at::kDouble);
}

}  // namespace

std::int64_t StepWatch::progress_of(const torch::optim::Optimizer& optimizer) {
  std::int64_t progress = 0;
  for (const auto& [parameter, state] : optimizer.state()) {
    if (state != nullptr) progress += 1 + steps_in(*state);
  }
  return progress;
}

void StepWatch::start(torch::optim::Optimizer& optimizer) {
  stop();
  on_ = true;
  progress_ = progress_of(optimizer);
  if (progress_ != 0) return;
  const at::NoGradGuard no_grad;
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined() || !grad.is_cpu() || grad.layout() != at::kStrided || !parameter.is_cpu() ||
        !parameter.is_floating_point() || parameter.numel() == 0)
      return;
    // The largest gradient moves the most.
    const at::Tensor places = grad.detach().reshape(-1).abs().argmax().reshape(1);
    samples_.push_back({parameter, version_of(parameter), places, elements(parameter, places),
                        elements(grad, places)});
  });
}

void StepWatch::stop() {
  on_ = false;
  samples_.clear();
}

bool StepWatch::has_stepped(torch::optim::Optimizer& optimizer) const {
  if (!on_) return false;
  if (progress_of(optimizer) != progress_) return true;
  const at::NoGradGuard no_grad;
  int against = 0;
  int along = 0;
  for (const Sample& sample : samples_) {
    if (version_of(sample.parameter) != sample.version) continue;
    const double moved = (elements(sample.parameter, sample.places) - sample.before).item<double>();
    const double grad = sample.grad.item<double>();
    if (moved * grad < 0) ++against;
    if (moved * grad > 0) ++along;
  }
  return against > 3 * along;
}

}  // namespace semitone::amp
