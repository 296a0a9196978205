#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/amp/captured_step_impl.h"
#include "src/autocast/model_entries.h"
#include "src/core/autograd_node.h"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

// Capture and replay of a step.
namespace semitone::amp {
namespace {

// The node that adds to a leaf's gradient lives as long as any loss that needs it, and runs on the
// stream of its first forward. A capture must not wait for a stream outside of it, so it gets a node
// of its own. One with hooks is kept, since they belong to the program.
void renew_accumulator(const at::Tensor& leaf) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (node != nullptr && node->pre_hooks().empty() && node->post_hooks().empty())
    torch::autograd::impl::set_grad_accumulator(leaf, WeakNodePtr(NodePtr()));
}

}  // namespace

void CapturedStep::Impl::capture(const Batch& batch) {
  state.settle();  // not in the capture
  auto next = std::make_unique<Captured>(optimizer, parameters, scaler().options(), device);
  for (const at::Tensor& tensor : batch) next->batch.push_back(tensor.detach().clone());
  for (const Model& model : state.models) {
    for (const ModelEntry& entry : entries_of(model)) next->model.emplace_back(entry.tensor);
  }
  send_numbers(*next);
  try {
    graph->capture([this, &into = *next] { run_on_device(into); });
  } catch (const c10::Error& error) {
    throw Error(kCapturedStep, "a step that can be captured in a CUDA graph",
                error.what_without_backtrace(),
                "do not read from the device (item(), printing, nonzero()), and do not depend on "
                "the batch's values");
  }
  next->scale_there.reset();
  captured = std::move(next);
}

// Runs the step's device work only: the host's state does not change.
void CapturedStep::Impl::run_on_device(Captured& into) {
  const at::AutoGradMode with_grad(true);
  const std::vector<at::Tensor> others = find_others();
  record.for_each_leaf(renew_accumulator);
  for (const at::Tensor& other : others) renew_accumulator(other);
  for (const at::Tensor& leaf : find_elsewhere()) renew_accumulator(leaf);
  const OthersAside aside(others);
  state.scale_on_device = {options.loss_id(), into.scale.scale(), into.scale.inverse()};
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
  const DisableCasts as_outside;  // a region would lower what the optimizer computes
  into.found_inf = take_found_inf();
  into.grads.clear();
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    if (parameter.grad().defined()) into.grads.push_back({parameter, parameter.grad()});
  });
  record.masters.has_value() ? record.masters->step(into.step, into.found_inf)
                             : into.step.run(nullptr, into.found_inf);
  if (into.found_inf.defined()) into.scale.update(into.found_inf);
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

// Waits for the results of other steps that have used this loss or this optimizer.
void CapturedStep::Impl::settle_others() {
  for (const State::Undecided& one : state.undecided) {
    const bool own = captured != nullptr && one.flags == captured->late;
    const bool concerns = one.optimizer == &record ||
                          std::any_of(one.losses.begin(), one.losses.end(), [&](const auto& loss) {
                            return loss.id == options.loss_id();
                          });
    if (!own && concerns) return state.settle();
  }
}

// Whether the result of the last replay is unknown.
bool CapturedStep::Impl::is_open() const {
  return captured->late != nullptr &&
         std::any_of(state.undecided.begin(), state.undecided.end(),
                     [&](const State::Undecided& one) { return one.flags == captured->late; });
}

void CapturedStep::Impl::send_numbers(Captured& to) const {
  const at::NoGradGuard no_grad;
  if (&to != captured.get() || !is_open()) {
    const auto late = std::exchange(to.late, nullptr);
    if (late != nullptr && to.scale_there.has_value())
      to.scale_there =
          detail::next_loss_scale(to.scale.options(), *to.scale_there, late->any_set());
    const detail::LossScaleState& now = scaler().state();
    if (to.scale_there != now) to.scale.send(now);
    to.scale_there = now;
  }
  to.step.send_rules();
}

CapturedStep::Result CapturedStep::Impl::replay(const Batch& batch) {
  mixed.zero_grad(optimizer);  // gradients of a backward outside of this class
  at::Tensor loss = at::empty_like(captured->loss);
  const at::NoGradGuard no_grad;
  const bool ends_later = may_end_later();
  if (!ends_later) state.settle();
  for (std::size_t i = 0; i < batch.size(); ++i) captured->batch[i].copy_(batch[i]);
  send_numbers(*captured);
  graph->replay();
  loss.copy_(captured->loss);
  state.settle();  // the step before, while the device works on this one
  return {std::move(loss), ends_later ? end_later() : StepResult(end_step())};
}

// Whether the host need not know the outcome of a step at once. For the names of parameters it has
// to look at the gradients, which the next step overwrites.
bool CapturedStep::Impl::may_end_later() const {
  return captured->found_inf.defined() && !events::listening() &&
         scaler().options().max_consecutive_skips() == 0;
}

// Does the host's part of MixedPrecision::step for a step whose outcome it does not know.
StepResult CapturedStep::Impl::end_later() {
  captured->scale_there = scaler().state();
  captured->late = std::make_shared<detail::LateFlags>(captured->found_inf.reshape({1}));
  captured->step.count_unless(captured->late);
  note_step();
  clear_cast_cache();
  state.undecided.push_back({captured->late, {{options.loss_id(), true}}, &record});
  return StepResult(captured->late);
}

// Does the host's part of MixedPrecision::step after the device has done its part.
Step CapturedStep::Impl::end_step() {
  if (captured->found_inf.defined()) {
    for (const State::SetAside& one : captured->grads) one.parameter.mutable_grad() = one.grad;
    state.pending.push_back({options.loss_id(), {&record}, {captured->found_inf}});
  }
  const auto clean_up = c10::make_scope_exit([&] { mixed.zero_grad(optimizer); });
  captured->scale_there.reset();
  const Step step = state.end_step(record, [this] {
    captured->step.count();
    note_step();
  });
  captured->scale_there = scaler().state();
  return step;
}

// The device has changed the weights, or left them: autograd's version counters change.
void CapturedStep::Impl::note_step() {
  record.for_each_without_master(
      [](const at::Tensor& parameter) { parameter.unsafeGetTensorImpl()->bump_version(); });
  if (record.masters.has_value()) record.masters->note_step();
}

bool CapturedStep::Impl::is_current() {
  return captured->step.is_current() && same_rule(captured->scale.options(), scaler().options()) &&
         std::all_of(captured->model.begin(), captured->model.end(),
                     [](const Place& place) { return place.is_current(); });
}

}  // namespace semitone::amp
