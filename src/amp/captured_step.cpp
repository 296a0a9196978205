#include "semitone/amp/captured_step.h"

#include "semitone/core/error.h"
#include "src/amp/captured_step_impl.h"
#include "src/autocast/model_entries.h"
#include "src/core/capture_scope.h"
#include "src/kernels/on_cuda.h"

#include <c10/util/ScopeExit.h>
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

void check_options(const CapturedStepOptions& options) {
  if (options.warmup() < 1)
    throw Error(kCapturedStep, "a warmup of at least 1", std::to_string(options.warmup()));
  if (!(options.max_grad_norm() >= 0))
    throw Error(kCapturedStep, "a max_grad_norm of 0 or more",
                std::to_string(options.max_grad_norm()));
}

// As torch.nn.utils.clip_grad_norm_, with all numbers on the device. A norm that is not finite
// clips nothing: otherwise all gradients would become NaN, and the origin could no longer be found.
void clip(const std::vector<at::Tensor>& parameters, double max_norm) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  std::unordered_set<const c10::TensorImpl*> seen;  // a tied weight is listed twice
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined() && seen.insert(parameter.unsafeGetTensorImpl()).second)
      grads.push_back(parameter.grad());
  }
  if (grads.empty()) return;
  // In fp64: the squares of finite gradients may overflow fp32.
  const at::Tensor norm = at::stack(at::_foreach_norm(grads, 2, at::kDouble)).norm();
  const at::Tensor factor = norm.add(1e-6).reciprocal().mul(max_norm).clamp_max(1);
  at::_foreach_mul_(grads,
                    at::where(norm.isfinite(), factor, at::ones_like(factor)).to(at::kFloat));
}

}  // namespace

// A graph's step takes learning rates and found_inf from the device's memory, where LibTorch's
// operators would have to read them on the host: a GPU that is too old for the kernels has none.
std::unique_ptr<StepGraph> CapturedStep::Impl::make_graph(c10::Device device) {
  const at::Tensor on_device = at::empty({0}, device);
  return kernels::has_kernels(on_device) ? make_step_graph(device) : nullptr;
}

std::vector<CapturedStep::Impl::Shape> CapturedStep::Impl::shapes_of(const Batch& batch) {
  std::vector<Shape> shapes;
  for (const at::Tensor& tensor : batch)
    shapes.push_back({tensor.sizes().vec(), tensor.scalar_type()});
  return shapes;
}

CapturedStep::Result CapturedStep::Impl::run(const Batch& batch) {
  settle_others();
  state.hide_gradients();
  const bool before = std::exchange(state.named_only, true);
  const auto clean_up = c10::make_scope_exit([&] {
    state.named_only = before;
    show_gradients_of_others();
  });
  const Batch here = moved_to_device(batch);
  if (graph == nullptr) return run_eagerly(here);
  const CaptureScope scope;
  if (state.found_inf_hook)
    throw Error(kCapturedStep, "no found_inf hook", "one", "train without CapturedStep");
  if (state.has_fp8())  // the host computes its scales
    throw Error(kCapturedStep, "a policy without fp8()", "one with fp8()",
                "train without CapturedStep");
  // Changed or unfrozen weights update the masters here, not in the graph.
  state.sync("captured_step");
  if (captured != nullptr && !is_current()) {
    state.settle();  // waits for the graph
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

// The program may clip them, or zero them.
void CapturedStep::Impl::show_gradients_of_others() {
  for (State::OptimizerRecord& other : state.optimizers)
    if (&other != &record && other.masters.has_value()) other.masters->show_gradients();
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
    for (const ModelEntry& entry : entries_of(model)) {
      if (entry.is_parameter) add(entry.tensor);
    }
  }
  return found;
}

// Parameters of other MixedPrecision objects of this thread, whose models may be part of the loss.
std::vector<at::Tensor> CapturedStep::Impl::find_elsewhere() const {
  std::unordered_set<const c10::TensorImpl*> seen;
  record.for_each_leaf([&](const at::Tensor& leaf) { seen.insert(leaf.unsafeGetTensorImpl()); });
  std::vector<at::Tensor> found;
  for (State* const other : state.others_of_thread()) {
    other->find_free_parameters();
    other->for_each_parameter_of_models([&](const at::Tensor& parameter) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) found.push_back(parameter);
    });
  }
  return found;
}

CapturedStep::Impl::Batch CapturedStep::Impl::moved_to_device(const Batch& batch) const {
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
  const OthersAside aside(find_elsewhere());
  mixed.scale_loss(loss, optimizer, ScaleLossOptions().loss_id(options.loss_id())).backward();
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
  impl_->state.settle();  // waits for the graph
  impl_->captured.reset();
  if (impl_->graph != nullptr) impl_->graph->reset();
  impl_->warm_steps = 0;
}

}  // namespace semitone::amp
