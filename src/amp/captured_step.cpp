#include "semitone/amp/captured_step.h"

#include "semitone/amp/autocast.h"
#include "semitone/core/error.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/step_graph.h"
#include "src/optim/repeated_step.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

namespace semitone::amp {
namespace {

constexpr auto kCapturedStep = "amp.captured_step";
using Batch = std::vector<at::Tensor>;

void check_options(const CapturedStepOptions& options) {
  if (options.warmup() < 1)
    throw Error(kCapturedStep, "a warmup of at least 1", std::to_string(options.warmup()));
  if (!(options.max_grad_norm() >= 0))
    throw Error(kCapturedStep, "a max_grad_norm of 0 or more",
                std::to_string(options.max_grad_norm()));
}

bool are_alike(const Batch& a, const Batch& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type();
  });
}

// As torch.nn.utils.clip_grad_norm_, with all numbers on the device.
void clip(const std::vector<at::Tensor>& parameters, double max_norm) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) grads.push_back(parameter.grad());
  }
  if (grads.empty()) return;
  const at::Tensor norm = at::stack(at::_foreach_norm(grads, 2, at::kFloat)).norm();
  at::_foreach_mul_(grads, norm.add(1e-6).reciprocal().mul(max_norm).clamp_max(1));
}

// A tensor and where its memory was.
struct Place {
  explicit Place(at::Tensor tensor_) : tensor(std::move(tensor_)), data(tensor.const_data_ptr()) {}
  bool is_current() const { return tensor.const_data_ptr() == data; }
  at::Tensor tensor;
  const void* data;
};

}  // namespace

struct CapturedStep::Impl {
  using State = MixedPrecision::Impl;

  // What a captured step reads and writes.
  struct Captured {
    Captured(optim::FusedOptimizer& optimizer, std::span<const at::Tensor> parameters)
        : step(optimizer, parameters) {}
    Batch batch;
    optim::RepeatedStep step;
    State::ScaleOnDevice scale;
    double scale_sent = 0;
    std::vector<Place> model;
    at::Tensor loss;
    at::Tensor found_inf;                // undefined in plain training
    std::vector<State::SetAside> grads;  // of the optimizer's parameters, for messages
  };

  Impl(MixedPrecision& mixed_, State& state_, optim::FusedOptimizer& optimizer_,
       LossFunction loss_function_, const CapturedStepOptions& options_)
      : mixed(mixed_),
        state(state_),
        known(state_.of(optimizer_, "captured_step")),
        optimizer(optimizer_),
        loss_function(std::move(loss_function_)),
        options(options_),
        device(device_of(optimizer_)),
        graph(make_step_graph(device)) {}

  Result run(const Batch& batch);
  Result run_by_operators(const Batch& batch);
  void capture(const Batch& batch);
  void record(Captured& into);
  Result replay(const Batch& batch);
  Step end_step();

  Batch brought(const Batch& batch) const;
  at::Tensor loss_of(const Batch& batch) const;
  void back_propagate(const at::Tensor& loss);
  at::Tensor take_found_inf();
  void send_numbers(Captured& to) const;
  bool is_current() const;

  MixedPrecision& mixed;
  State& state;
  State::PerOptimizer& known;
  optim::FusedOptimizer& optimizer;
  LossFunction loss_function;
  CapturedStepOptions options;
  c10::Device device;
  std::unique_ptr<StepGraph> graph;  // null: none on this device

  std::int64_t warm_steps = 0;
  Batch warm_batch;                    // what they were taken with
  std::vector<at::Tensor> parameters;  // of the optimizer, that had gradients in the last of them
  std::unique_ptr<Captured> captured;
};

CapturedStep::Result CapturedStep::Impl::run(const Batch& batch) {
  const Batch here = brought(batch);
  if (graph == nullptr) return run_by_operators(here);
  const bool is_new = captured == nullptr;
  if (!is_new && !are_alike(here, captured->batch)) return run_by_operators(here);
  if (is_new && !are_alike(here, warm_batch)) warm_steps = 0;
  if (warm_steps < options.warmup()) {
    std::optional<Result> result;
    graph->warm_up([&] { result = run_by_operators(here); });
    warm_batch = here;
    ++warm_steps;
    return *result;
  }
  if (is_new || !is_current()) capture(here);
  return replay(here);
}

Batch CapturedStep::Impl::brought(const Batch& batch) const {
  Batch here;
  here.reserve(batch.size());
  for (const at::Tensor& tensor : batch) {
    if (!tensor.defined()) throw Error(kCapturedStep, "a batch of tensors", "an undefined one");
    here.push_back(tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true));
  }
  return here;
}

at::Tensor CapturedStep::Impl::loss_of(const Batch& batch) const {
  const at::AutoGradMode with_grad(true);
  at::Tensor loss = loss_function(batch);
  if (!loss.defined() || loss.numel() != 1 || loss.device() != device) {
    throw Error(kCapturedStep, "a loss of one element on " + device.str(),
                loss.defined() ? c10::str(loss.sizes(), " on ", loss.device()) : "none");
  }
  return loss;
}

void CapturedStep::Impl::back_propagate(const at::Tensor& loss) {
  mixed.scale_loss(loss, optimizer, {.loss_id = options.loss_id()}).backward();
  if (options.max_grad_norm() > 0) clip(mixed.master_params(optimizer), options.max_grad_norm());
}

CapturedStep::Result CapturedStep::Impl::run_by_operators(const Batch& batch) {
  mixed.zero_grad(optimizer);
  try {
    const at::Tensor loss = loss_of(batch);
    back_propagate(loss);
    parameters.clear();
    for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
      if (parameter.grad().defined()) parameters.push_back(parameter);
    });
    const Step step = mixed.step(optimizer);
    mixed.zero_grad(optimizer);
    return {loss.detach(), step};
  } catch (...) {
    mixed.zero_grad(optimizer);
    throw;
  }
}

void CapturedStep::Impl::capture(const Batch& batch) {
  if (state.found_inf_hook) {
    throw Error(kCapturedStep, "no found_inf hook", "one", "train without CapturedStep");
  }
  captured.reset();  // its state that no step has used goes first
  auto next = std::make_unique<Captured>(optimizer, parameters);
  for (const at::Tensor& tensor : batch) next->batch.push_back(tensor.clone());
  for (const Model& model : state.models) {
    for (const Model::Entry& entry : model.entries()) next->model.emplace_back(entry.tensor);
  }
  const auto fp32 = at::TensorOptions(device).dtype(at::kFloat);
  next->scale = {at::empty({}, fp32), at::empty({}, fp32)};
  send_numbers(*next);
  try {
    graph->capture([this, &into = *next] { record(into); });
  } catch (const c10::Error& error) {
    throw Error(kCapturedStep, "a step that can be captured in a CUDA graph",
                error.what_without_backtrace(),
                "it must not read from the device (item(), printing, nonzero()) nor depend on the "
                "batch's values");
  }
  captured = std::move(next);
}

// The step, for the device alone to remember: of the host's state, nothing changes.
void CapturedStep::Impl::record(Captured& into) {
  state.scale_on_device = into.scale;
  const auto clean_up = [this] {
    mixed.zero_grad(optimizer);
    clear_cast_cache();  // casts are of this step alone
    state.scale_on_device.reset();
  };
  try {
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
    known.masters.has_value() ? known.masters->step(into.step, into.found_inf)
                              : into.step.run(nullptr, into.found_inf);
  } catch (...) {
    clean_up();
    throw;
  }
  clean_up();
}

// One flag for all that the losses of the optimizer have found; undefined if nobody has looked.
at::Tensor CapturedStep::Impl::take_found_inf() {
  std::vector<at::Tensor> flags;
  std::erase_if(state.pending, [&](const State::Pending& pending) {
    if (pending.optimizers != std::vector<State::PerOptimizer*>{&known}) return false;
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
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < batch.size(); ++i)
      captured->batch[i].copy_(batch[i], /*non_blocking=*/true);
  }
  send_numbers(*captured);
  graph->replay();
  at::Tensor loss = captured->loss.clone();
  return {std::move(loss), end_step()};
}

// What MixedPrecision::step does after the device has done its part.
Step CapturedStep::Impl::end_step() {
  if (captured->found_inf.defined()) {
    for (const State::SetAside& one : captured->grads) one.parameter.mutable_grad() = one.grad;
    state.pending.push_back({options.loss_id(), {&known}, {captured->found_inf}});
  }
  try {
    const Step step = state.end_step(known, [this] { captured->step.count(); });
    mixed.zero_grad(optimizer);
    return step;
  } catch (...) {
    mixed.zero_grad(optimizer);
    throw;
  }
}

bool CapturedStep::Impl::is_current() const {
  return captured->step.is_current() &&
         std::all_of(captured->model.begin(), captured->model.end(),
                     [](const Place& place) { return place.is_current(); });
}

CapturedStep::CapturedStep(MixedPrecision& mixed, optim::FusedOptimizer& optimizer,
                           LossFunction loss, const CapturedStepOptions& options) {
  check_options(options);
  if (!loss) throw Error(kCapturedStep, "a function that computes the loss", "none");
  mixed.loss_scaler(options.loss_id());  // is there
  impl_ = std::make_unique<Impl>(mixed, *mixed.impl_, optimizer, std::move(loss), options);
  if (impl_->graph != nullptr) const optim::RepeatedStep can_be_repeated(optimizer, {});
}

CapturedStep::~CapturedStep() = default;

CapturedStep::Result CapturedStep::run(const std::vector<at::Tensor>& batch) {
  return impl_->run(batch);
}

bool CapturedStep::is_captured() const {
  return impl_->captured != nullptr;
}

void CapturedStep::reset() {
  impl_->captured.reset();
  impl_->warm_steps = 0;
}

}  // namespace semitone::amp
