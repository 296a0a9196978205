#include "src/report/sample_state.h"

#include "src/report/scaled_counts.h"
#include "src/report/tensor_values.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include <nlohmann/json.hpp>

#include <exception>
#include <utility>

namespace semitone::report {
namespace {

using Json = nlohmann::ordered_json;

Json describe_parts(const StepTimer::Parts& parts) {
  Json phases;
  for (std::size_t i = 0; i < parts.phases.size(); ++i)
    phases[std::string(events::name_of(static_cast<events::Phase>(i)))] = parts.phases[i];
  phases["other"] = parts.other;
  return phases;
}

Json describe_batch_norms(const std::map<std::string, BatchNormUse>& batch_norms) {
  Json list = Json::array();
  for (const auto& [layer, use] : batch_norms) {
    Json one{{"layer", layer}, {"training", use.training}};
    if (use.dtype != c10::ScalarType::Undefined) one["dtype"] = c10::toString(use.dtype);
    list.push_back(std::move(one));
  }
  return list;
}

std::int64_t model_bytes(const RecordedModel& model) {
  std::int64_t bytes = 0;
  for (const auto* const entry : model.parameters())
    bytes += static_cast<std::int64_t>(entry->tensor.nbytes());
  return bytes;
}

}  // namespace

SampleState::SampleState(std::shared_ptr<const RecordedModel> model, const KnownScales& known)
    : model_(std::move(model)),
      early_scale_(known.scale.has_value() && !is_power_of_two(*known.scale) ? *known.scale : 1),
      scales_(known),
      tensors_(*model_),
      tracker_(*model_),
      timer_(steady_seconds()) {}

std::shared_ptr<SampleState> SampleState::looking() {
  auto* const state = static_cast<SampleState*>(c10::ThreadLocalDebugInfo::get(kSampleState));
  if (state == nullptr || !state->is_looking()) return nullptr;
  return state->shared_from_this();
}

void SampleState::fail(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!failure_.has_value()) failure_ = why;
  is_looking_ = false;
  tracker_.clear();
}

void SampleState::discard() {
  const std::lock_guard lock(mutex_);
  is_looking_ = false;
  tracker_.clear();
}

std::optional<std::string> SampleState::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

Pass SampleState::begin_operator(double now) {
  if (torch::autograd::get_current_node() != nullptr) return Pass::backward;
  if (!is_own_thread()) return Pass::forward;
  const std::lock_guard lock(mutex_);
  const auto phase = timer_.phase();
  if (phase == events::Phase::backward) return Pass::backward;
  if (phase == events::Phase::optimizer || phase == events::Phase::unscale) return Pass::optimizer;
  if (phase == events::Phase::data || phase == events::Phase::communication) return Pass::other;
  // An optimizer without events, for example.
  if (!phase.has_value() && timer_.has_nodes() && !at::GradMode::is_enabled()) return Pass::other;
  timer_.begin_forward_operator(now);
  return Pass::forward;
}

void SampleState::begin_node(double now) {
  const std::lock_guard lock(mutex_);
  forward_memory_.backward_began();
  timer_.begin_node(now);
}

void SampleState::end_node(double now) {
  const std::lock_guard lock(mutex_);
  timer_.end_node(now);
}

void SampleState::begin_phase(events::Phase phase, double now) {
  if (!is_own_thread()) return;
  const std::lock_guard lock(mutex_);
  timer_.begin_phase(phase, now);
}

void SampleState::end_phase(double now) {
  if (!is_own_thread()) return;
  const std::lock_guard lock(mutex_);
  timer_.end_phase(now);
}

void SampleState::add_operator(const OperatorKind& kind, const OperatorCost& cost) {
  const std::lock_guard lock(mutex_);
  operators_.add(kind, cost);
}

void SampleState::add_output(const OutputKey& key, const at::Tensor& output) {
  // A number is a penalty or a loss.
  if (!can_sample(output) || output.dim() == 0 || !model_->is_leaf(key.parameter->layer)) return;
  const bool is_differentiated = at::GradMode::is_enabled();
  {
    // An evaluation within the step is not what is trained.
    const std::lock_guard lock(mutex_);
    if (!is_differentiated && (timer_.has_nodes() || tensors_.is_differentiated(key))) return;
  }
  const SampledValues values = sample_of(output);
  {
    const std::lock_guard lock(mutex_);
    tensors_.add_output(key, values, is_differentiated);
  }
  if (output.requires_grad()) watch_gradient(output, key);
}

void SampleState::add_memory(const c10::Storage& storage) {
  const std::lock_guard lock(mutex_);
  forward_memory_.add(storage);
}

void SampleState::add_batch_norm(const std::string& layer, const BatchNormUse& use) {
  const std::lock_guard lock(mutex_);
  BatchNormUse& all = batch_norms_.try_emplace(layer, use).first->second;
  all.training = all.training || use.training;
}

// The hook stays as long as the graph. It holds nothing, and does nothing after the step.
void SampleState::watch_gradient(const at::Tensor& output, const OutputKey& key) {
  output.register_hook([weak = weak_from_this(), key](const at::Tensor& gradient) {
    const auto state = weak.lock();
    if (state == nullptr || !state->is_looking() || !can_sample(gradient)) return;
    const Observation observation(state->observed());
    try {
      const QuietScope quiet;
      const SampledValues values = sample_of(gradient, state->early_scale_);
      const std::lock_guard lock(state->mutex_);
      state->tensors_.add_output_gradient(key, values);
    } catch (const std::exception& error) {
      state->fail("gradient of the output of '" + key.parameter->layer + "': " + error.what());
    }
  });
}

void SampleState::add(const events::LossScaleUpdated& event) {
  const std::lock_guard lock(mutex_);
  if (event.loss_id != 0) {
    scales_.has_other_losses = true;
    return;
  }
  if (has_update_ && scales_.scale != event.before) scale_changes_ = true;
  has_update_ = true;
  scales_.scale = event.before;
}

void SampleState::add(const events::StepSkipped&) {
  const std::lock_guard lock(mutex_);
  is_skipped_ = true;
}

void SampleState::add(const events::GradientsUnscaled& event) {
  for (std::size_t i = 0; i < event.parameters.size() && i < event.gradients.size(); ++i) {
    const auto* const entry = model_->find(event.parameters[i]);
    if (entry == nullptr || !can_sample(event.gradients[i])) continue;
    const SampledValues values = sample_of(event.gradients[i], event.scale);
    const std::lock_guard lock(mutex_);
    unscaled_.insert_or_assign(entry, values);
  }
}

void SampleState::add(const events::GradientsReady& event) {
  if (event.scale != 1) {
    const std::lock_guard lock(mutex_);
    has_scaled_step_ = true;
  }
  for (std::size_t i = 0; i < event.parameters.size() && i < event.gradients.size(); ++i) {
    const at::Tensor& gradient = event.gradients[i];
    const auto* const entry = model_->find(event.parameters[i]);
    if (entry == nullptr || !can_sample(gradient)) continue;
    const auto unscaled = [&] {
      const std::lock_guard lock(mutex_);
      return unscaled_.extract(entry);
    }();
    const SampledValues values = unscaled ? unscaled.mapped() : sample_of(gradient, event.scale);
    const std::lock_guard lock(mutex_);
    tensors_.add_gradient(*entry, values, static_cast<std::int64_t>(gradient.nbytes()));
  }
  const std::lock_guard lock(mutex_);
  if (is_looking()) tracker_.add(*model_, event);  // not after fail()
}

void SampleState::add_remaining_gradients() {
  const bool is_unscaled = has_unscaled_gradients();
  for (const auto* const entry : model_->parameters()) {
    const at::Tensor& gradient = entry->tensor.grad();
    if (tensors_.has_gradient(*entry) || !can_sample(gradient)) continue;
    tensors_.add_gradient(*entry, is_unscaled ? std::optional(sample_of(gradient)) : std::nullopt,
                          static_cast<std::int64_t>(gradient.nbytes()));
  }
}

bool SampleState::has_unscaled_gradients() const {
  return !scales_.scale.has_value() && !scales_.has_other_losses && !has_scaled_step_ &&
         (tracker_.has_events() || tracker_.has_changes());
}

std::optional<double> SampleState::output_scale() const {
  if (scale_changes_ || (!scales_.scale.has_value() && !has_unscaled_gradients()))
    return std::nullopt;
  const double left = scales_.scale.value_or(1) / early_scale_;
  if (scales_.has_other_losses || !is_power_of_two(left)) return std::nullopt;
  return left;
}

Json SampleState::finish(double now, std::optional<std::int64_t> optimizer_state_bytes) {
  const std::lock_guard lock(mutex_);
  tracker_.compare();
  add_remaining_gradients();
  const StepTimer::Parts parts = timer_.parts(now);
  Json memory{{"parameters", model_bytes(*model_)},
              {"masters", tracker_.master_bytes()},
              {"gradients", tensors_.gradient_bytes()},
              {"activations", forward_memory_.bytes()}};
  if (optimizer_state_bytes.has_value()) memory["optimizer_state"] = *optimizer_state_bytes;
  Json line;
  if (scales_.scale.has_value() && !scale_changes_) line["loss_scale"] = *scales_.scale;
  line["skipped"] = is_skipped_;
  line["seconds"] = parts.total;
  line["phases"] = describe_parts(parts);
  line["memory"] = std::move(memory);
  line["tensors"] = tensors_.describe(*model_, output_scale());
  line["updates"] = tracker_.updates();
  line["batch_norms"] = describe_batch_norms(batch_norms_);
  line["operators"] = operators_.describe();
  return line;
}

}  // namespace semitone::report
