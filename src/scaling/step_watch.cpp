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

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>

namespace semitone::amp {
namespace {

using torch::optim::OptimizerParamState;

// The number of steps in a parameter's state; nullopt if the state does not count them.
std::optional<std::int64_t> steps_in(const OptimizerParamState& state) {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  if (const auto* fused = dynamic_cast<const optim::FusedState*>(&state)) return fused->step;
  if (const auto* adam = dynamic_cast<const AdamParamState*>(&state)) return adam->step();
  if (const auto* adam_w = dynamic_cast<const AdamWParamState*>(&state)) return adam_w->step();
  if (const auto* adagrad = dynamic_cast<const AdagradParamState*>(&state)) return adagrad->step();
  if (const auto* rms = dynamic_cast<const RMSpropParamState*>(&state)) return rms->step();
  return std::nullopt;
}

const torch::optim::SGDParamState* as_sgd(const OptimizerParamState& state) {
  return dynamic_cast<const torch::optim::SGDParamState*>(&state);
}

// A number that grows with each step, as far as a parameter's state shows it.
std::int64_t progress_in(const OptimizerParamState& state) {
  if (const auto* sgd = as_sgd(state)) {
    const at::Tensor& buffer = sgd->momentum_buffer();
    return buffer.defined() ? version_of(buffer) : 0;
  }
  return steps_in(state).value_or(0);
}

const OptimizerParamState* state_of(const torch::optim::Optimizer& optimizer,
                                    const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : found->second.get();
}

at::Tensor element(const at::Tensor& tensor, const at::Tensor& place) {
  return tensor.detach().reshape(-1).index_select(0, place).to(at::kDouble);
}

// The place of the largest absolute value, without a copy of the tensor if it is contiguous.
at::Tensor place_of_largest(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().reshape(-1);
  const at::Tensor places = at::stack({flat.argmax(), flat.argmin()});
  return places.index_select(0, flat.index_select(0, places).abs().argmax().reshape(1));
}

bool can_look_at(const at::Tensor& parameter, const at::Tensor& grad) {
  return (parameter.is_cpu() || parameter.is_cuda()) && grad.device() == parameter.device() &&
         grad.layout() == at::kStrided && parameter.is_floating_point() && parameter.numel() > 0;
}

}  // namespace

void StepWatch::start(torch::optim::Optimizer& optimizer) {
  stop();
  on_ = true;
  const at::NoGradGuard no_grad;
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined()) return;
    Watched& watched = watched_.emplace_back(
        Watched{parameter, version_of(parameter), state_of(optimizer, parameter)});
    if (watched.state != nullptr) {
      watched.progress = progress_in(*watched.state);
    } else if (can_look_at(parameter, grad)) {
      // The largest gradient moves the most.
      watched.place = place_of_largest(grad);
      watched.before = element(parameter, watched.place);
      watched.grad = element(grad, watched.place);
    }
  });
}

void StepWatch::stop() {
  on_ = false;
  watched_.clear();
}

// Whether a parameter has changed as by the first step of its new state.
bool StepWatch::has_moved(const Watched& watched) {
  const at::NoGradGuard no_grad;
  // SGD's step does not change the version, but loading weights does.
  if (version_of(watched.parameter) != watched.version) return as_sgd(*watched.state) == nullptr;
  if (!watched.place.defined()) return !steps_in(*watched.state).has_value();
  const double before = watched.before.item<double>();
  const double now = element(watched.parameter, watched.place).item<double>();
  return now != before && !(std::isnan(now) && std::isnan(before));
}

bool StepWatch::state_shows_step(const torch::optim::Optimizer& optimizer) const {
  if (!on_) return false;
  std::vector<Watched> fresh;  // with their new states
  for (const Watched& watched : watched_) {
    const OptimizerParamState* const state = state_of(optimizer, watched.parameter);
    if (state == watched.state) {
      if (state != nullptr && progress_in(*state) > watched.progress) return true;
      continue;
    }
    if (watched.state != nullptr) return false;  // loaded
    const std::int64_t steps = steps_in(*state).value_or(1);
    if (steps > 1) return false;  // loaded
    if (steps == 0) continue;     // created without a step
    fresh.push_back(watched);
    fresh.back().state = state;
  }
  return std::any_of(fresh.begin(), fresh.end(), has_moved);
}

bool StepWatch::moved_against_gradients(const torch::optim::Optimizer& optimizer) const {
  const at::NoGradGuard no_grad;
  int against = 0;
  int along = 0;
  for (const Watched& watched : watched_) {
    if (!watched.place.defined() || !watched.parameter.is_cpu() ||
        version_of(watched.parameter) != watched.version ||
        state_of(optimizer, watched.parameter) != nullptr)
      continue;
    const double moved =
        (element(watched.parameter, watched.place) - watched.before).item<double>();
    const double grad = watched.grad.item<double>();
    if (moved * grad < 0) ++against;
    if (moved * grad > 0) ++along;
  }
  return against > 3 * along;
}

bool StepWatch::has_stepped(const torch::optim::Optimizer& optimizer) const {
  return on_ && (state_shows_step(optimizer) || moved_against_gradients(optimizer));
}

}  // namespace semitone::amp
