#include "semitone/amp/captured_step.h"

#include "semitone/amp/autocast.h"
#include "semitone/core/error.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/step_graph.h"
#include "src/optim/capturable_step.h"

#include <c10/util/ScopeExit.h>
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

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

// The shapes, dtypes and devices of a batch.
struct Shape {
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype;
  bool operator==(const Shape&) const = default;
};

std::vector<Shape> shapes_of(const Batch& batch) {
  std::vector<Shape> shapes;
  for (const at::Tensor& tensor : batch)
    shapes.push_back({tensor.sizes().vec(), tensor.scalar_type()});
  return shapes;
}

// As torch.nn.utils.clip_grad_norm_, with all numbers on the device. A norm that is not finite
// clips nothing: otherwise all gradients would become NaN, and the origin could no longer be found.
void clip(const std::vector<at::Tensor>& parameters, double max_norm) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) grads.push_back(parameter.grad());
  }
  if (grads.empty()) return;
  const at::Tensor norm = at::stack(at::_foreach_norm(grads, 2, at::kFloat)).norm();
  const at::Tensor factor = norm.add(1e-6).reciprocal().mul(max_norm).clamp_max(1);
  at::_foreach_mul_(grads, at::where(norm.isfinite(), factor, at::ones_like(factor)));
}

// A parameter or buffer, with its memory and requires_grad at capture.
struct Place {
  explicit Place(at::Tensor tensor_)
      : tensor(std::move(tensor_)),
        data(tensor.const_data_ptr()),
        requires_grad(tensor.requires_grad()) {}
  bool is_current() const {
    return tensor.const_data_ptr() == data && tensor.requires_grad() == requires_grad;
  }
  at::Tensor tensor;
  const void* data;
  bool requires_grad;
};

// While this object exists, these parameters have no gradients; then their own gradients are
// restored, instead of those of the step. In a graph these would be accumulated in memory that
// other code may own by then.
class OthersAside {
 public:
  explicit OthersAside(std::vector<at::Tensor> others) : others_(std::move(others)) {
    for (const at::Tensor& other : others_) {
      grads_.push_back(other.grad());
      other.mutable_grad().reset();
    }
  }
  ~OthersAside() {
    for (std::size_t i = 0; i < others_.size(); ++i) others_[i].mutable_grad() = grads_[i];
  }
  OthersAside(const OthersAside&) = delete;
  OthersAside& operator=(const OthersAside&) = delete;

 private:
  std::vector<at::Tensor> others_;
  std::vector<at::Tensor> grads_;
};

}  // namespace

// A step is in one of three stages. It warms up until options.warmup steps have run operator by
// operator, which also finds the parameters that get gradients. The next step is captured: record()
// runs forward, backward and the update on the device's memory, without changing the host's state.
// All later steps replay: they copy the batch and the numbers to the device, launch the graph, and
// end_step() updates the host's state (scales, counters, step counts, versions). If memory, state
// or trained parameters have changed (is_current), the step is dropped, one step runs operator by
// operator, and the next is captured again.
struct CapturedStep::Impl {
  using State = MixedPrecision::Impl;

  // The tensors that a captured step reads and writes.
  struct Captured {
    Captured(optim::FusedOptimizer& optimizer, std::span<const at::Tensor> parameters)
        : step(optimizer, parameters) {}
    Batch batch;
    optim::CapturableStep step;
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
        record(state_.of(optimizer_, "captured_step")),
        optimizer(optimizer_),
        loss_function(std::move(loss_function_)),
        options(options_),
        device(device_of(optimizer_)),
        graph(make_step_graph(device)) {}

  Result run(const Batch& batch);
  Result warm_up(const Batch& batch);
  Result run_eagerly(const Batch& batch);
  void capture(const Batch& batch);
  void run_on_device(Captured& into);
  Result replay(const Batch& batch);
  Step end_step();

  Batch moved_to_device(const Batch& batch) const;
  at::Tensor loss_of(const Batch& batch) const;
  void back_propagate(const at::Tensor& loss);
  at::Tensor take_found_inf();
  void send_numbers(Captured& to) const;
  bool is_current() const;
  std::vector<bool> trained() const;
  std::vector<at::Tensor> find_others() const;

  MixedPrecision& mixed;
  State& state;
  State::OptimizerRecord& record;
  optim::FusedOptimizer& optimizer;
  LossFunction loss_function;
  CapturedStepOptions options;
  c10::Device device;
  std::unique_ptr<StepGraph> graph;  // null: none on this device

  std::int64_t warm_steps = 0;
  std::vector<Shape> shapes;             // of the batches that they were taken with
  std::vector<bool> trained_in_warm_up;  // what trained() was
  std::vector<at::Tensor> parameters;    // of the optimizer, that had gradients in the last of them
  std::unique_ptr<Captured> captured;
};

CapturedStep::Result CapturedStep::Impl::run(const Batch& batch) {
  state.hide_gradients(nullptr);
  const bool before = std::exchange(state.named_only, true);
  const auto clean_up = c10::make_scope_exit([&] { state.named_only = before; });
  const Batch here = moved_to_device(batch);
  if (graph == nullptr) return run_eagerly(here);
  if (state.found_inf_hook)
    throw Error(kCapturedStep, "no found_inf hook", "one", "train without CapturedStep");
  // Changed or unfrozen weights update the masters here, not in the graph.
  state.sync("captured_step");
  if (captured != nullptr && !is_current()) {
    captured.reset();
    graph->reset();
    warm_steps = options.warmup() - 1;  // one more, for the parameters that have gradients
  }
  if (shapes_of(here) != shapes) {
    if (captured != nullptr) return run_eagerly(here);
    warm_steps = 0;
  }
  if (captured == nullptr && trained() != trained_in_warm_up)
    warm_steps = std::min(warm_steps, options.warmup() - 1);
  if (warm_steps < options.warmup()) return warm_up(here);
  if (captured == nullptr) capture(here);
  return replay(here);
}

CapturedStep::Result CapturedStep::Impl::warm_up(const Batch& batch) {
  std::optional<Result> result;
  graph->warm_up([&] { result = run_eagerly(batch); });
  shapes = shapes_of(batch);
  trained_in_warm_up = trained();
  ++warm_steps;
  return *result;
}

// For each parameter of the optimizer, whether it gets gradients.
std::vector<bool> CapturedStep::Impl::trained() const {
  std::vector<bool> trained;
  record.for_each_leaf([&](const at::Tensor& leaf) { trained.push_back(leaf.requires_grad()); });
  return trained;
}

// Parameters of the models that other optimizers, or none, train.
std::vector<at::Tensor> CapturedStep::Impl::find_others() const {
  std::unordered_set<const c10::TensorImpl*> seen;
  record.for_each_leaf([&](const at::Tensor& leaf) { seen.insert(leaf.unsafeGetTensorImpl()); });
  std::vector<at::Tensor> found;
  const auto add = [&](const at::Tensor& leaf) {
    if (seen.insert(leaf.unsafeGetTensorImpl()).second) found.push_back(leaf);
  };
  for (const State::OptimizerRecord& other : state.optimizers) other.for_each_leaf(add);
  for (const Model& model : state.models) {
    for (const Model::Entry& entry : model.entries()) {
      if (entry.is_parameter) add(entry.tensor);
    }
  }
  return found;
}

Batch CapturedStep::Impl::moved_to_device(const Batch& batch) const {
  Batch here;
  here.reserve(batch.size());
  for (const at::Tensor& tensor : batch) {
    if (!tensor.defined()) throw Error(kCapturedStep, "a batch of tensors", "an undefined one");
    here.push_back(tensor.to(device));
  }
  return here;
}

at::Tensor CapturedStep::Impl::loss_of(const Batch& batch) const {
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

CapturedStep::Result CapturedStep::Impl::run_eagerly(const Batch& batch) {
  const at::AutoGradMode with_grad(true);
  const OthersAside aside(find_others());
  const auto clean_up = c10::make_scope_exit([&] { mixed.zero_grad(optimizer); });
  mixed.zero_grad(optimizer);
  const at::Tensor loss = loss_of(batch);
  back_propagate(loss);
  parameters.clear();
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    if (parameter.grad().defined()) parameters.push_back(parameter);
  });
  return {loss.detach(), mixed.step(optimizer)};
}

void CapturedStep::Impl::capture(const Batch& batch) {
  auto next = std::make_unique<Captured>(optimizer, parameters);
  for (const at::Tensor& tensor : batch) next->batch.push_back(tensor.detach().clone());
  for (const Model& model : state.models) {
    for (const Model::Entry& entry : model.entries()) next->model.emplace_back(entry.tensor);
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

CapturedStep::CapturedStep(MixedPrecision& mixed, optim::FusedOptimizer& optimizer,
                           LossFunction loss, const CapturedStepOptions& options) {
  check_options(options);
  if (!loss) throw Error(kCapturedStep, "a function that computes the loss", "none");
  mixed.loss_scaler(options.loss_id());  // is there
  impl_ = std::make_unique<Impl>(mixed, mixed.impl(), optimizer, std::move(loss), options);
  if (impl_->graph != nullptr) const optim::CapturableStep can_be_captured(optimizer, {});
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
  if (impl_->graph != nullptr) impl_->graph->reset();
  impl_->warm_steps = 0;
}

}  // namespace semitone::amp
