#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"
#include "src/amp/captured_step_impl.h"
#include "src/autocast/model_entries.h"

#include <c10/util/ScopeExit.h>
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

// Capture and replay of a step.
namespace semitone::amp {

void CapturedStep::Impl::capture(const Batch& batch) {
  auto next = std::make_unique<Captured>(optimizer, parameters);
  for (const at::Tensor& tensor : batch) next->batch.push_back(tensor.detach().clone());
  for (const Model& model : state.models) {
    for (const ModelEntry& entry : entries_of(model)) next->model.emplace_back(entry.tensor);
  }
  const auto fp32 = at::TensorOptions(device).dtype(at::kFloat);
  next->scale = {options.loss_id(), at::empty({}, fp32), at::empty({}, fp32)};
  send_numbers(*next);
  try {
    graph->capture([this, &into = *next] { run_on_device(into); });
  } catch (const c10::Error& error) {
    throw Error(kCapturedStep, "a step that can be captured in a CUDA graph",
                error.what_without_backtrace(),
                "do not read from the device (item(), printing, nonzero()), and do not depend on "
                "the batch's values");
  }
  captured = std::move(next);
}

// Runs the step's device work only: the host's state does not change.
void CapturedStep::Impl::run_on_device(Captured& into) {
  const at::AutoGradMode with_grad(true);
  const OthersAside aside(find_others());
  state.scale_on_device = into.scale;
  const auto clean_up = c10::make_scope_exit([&] {
    mixed.zero_grad(optimizer);
    clear_cast_cache();  // casts are of this step alone
    state.scale_on_device.reset();
  });
  mixed.zero_grad(optimizer);
  clear_cast_cache();
  const at::Tensor loss = loss_of(into.batch);
  back_propagate(loss);
  into.loss = loss.detach();
  into.found_inf = take_found_inf();
  into.grads.clear();
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    if (parameter.grad().defined()) into.grads.push_back({parameter, parameter.grad()});
  });
  record.masters.has_value() ? record.masters->step(into.step, into.found_inf)
                             : into.step.run(nullptr, into.found_inf);
}

// One flag for the overflows of all losses of the optimizer; undefined if no check has been made.
at::Tensor CapturedStep::Impl::take_found_inf() {
  std::vector<at::Tensor> flags;
  std::erase_if(state.pending, [&](const State::Pending& pending) {
    if (pending.optimizers != std::vector<State::OptimizerRecord*>{&record}) return false;
    flags.insert(flags.end(), pending.found_inf.begin(), pending.found_inf.end());
    return true;
  });
  if (flags.size() <= 1) return flags.empty() ? at::Tensor() : flags.front();
  return at::stack(flags).amax();
}

void CapturedStep::Impl::send_numbers(Captured& to) const {
  const at::NoGradGuard no_grad;
  const LossScaler& scaler = state.scaler(options.loss_id(), "captured_step");
  if (to.scale_sent != scaler.scale()) {
    to.scale.scale.fill_(scaler.scale());
    to.scale.inverse.fill_(scaler.inverse());
    to.scale_sent = scaler.scale();
  }
  to.step.send_rules();
}

CapturedStep::Result CapturedStep::Impl::replay(const Batch& batch) {
  mixed.zero_grad(optimizer);  // gradients of a backward outside of this class
  at::Tensor loss = at::empty_like(captured->loss);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < batch.size(); ++i) captured->batch[i].copy_(batch[i]);
  send_numbers(*captured);
  graph->replay();
  loss.copy_(captured->loss);
  return {std::move(loss), end_step()};
}

// Does the host's part of MixedPrecision::step after the device has done its part.
Step CapturedStep::Impl::end_step() {
  if (captured->found_inf.defined()) {
    for (const State::SetAside& one : captured->grads) one.parameter.mutable_grad() = one.grad;
    state.pending.push_back({options.loss_id(), {&record}, {captured->found_inf}});
  }
  const auto note = [this] {
    captured->step.count();
    for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
      if (!record.masters.has_value() || !record.masters->is_master(parameter))
        parameter.unsafeGetTensorImpl()->bump_version();
    });
    if (record.masters.has_value()) record.masters->note_step();
  };
  const auto clean_up = c10::make_scope_exit([&] { mixed.zero_grad(optimizer); });
  return state.end_step(record, note);
}

bool CapturedStep::Impl::is_current() const {
  return captured->step.is_current() &&
         std::all_of(captured->model.begin(), captured->model.end(),
                     [](const Place& place) { return place.is_current(); });
}

}  // namespace semitone::amp
