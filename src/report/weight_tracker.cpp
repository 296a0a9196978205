#include "src/report/weight_tracker.h"

#include "src/core/exact_weights.h"

#include <torch/types.h>

#include <nlohmann/json.hpp>

#include <algorithm>

namespace semitone::report {
namespace {

at::Tensor fp32_copy(const at::Tensor& tensor) {
  return tensor.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

WeightTracker::WeightTracker(const RecordedModel& model) {
  weights_.reserve(model.parameters().size());
  for (const RecordedModel::Entry* const entry : model.parameters()) {
    if (!entry->tensor.requires_grad()) continue;
    places_.emplace(entry, weights_.size());
    weights_.push_back({entry});
  }
  copy(updated_places());
}

void WeightTracker::add(const RecordedModel& model, const events::GradientsReady& event) {
  std::vector<std::size_t> places;
  places.reserve(event.parameters.size());
  for (std::size_t i = 0; i < event.parameters.size(); ++i) {
    const auto found = places_.find(model.find(event.parameters[i]));
    if (found == places_.end()) continue;
    Weight& weight = weights_[found->second];
    weight.is_named = true;
    // Without one, the holder of the exact value is asked at the end of the step only: it may be in
    // the middle of its own step now.
    const at::Tensor& updated = i < event.weights.size() ? event.weights[i] : at::Tensor();
    weight.is_split = !updated.defined();
    if (weight.is_split) {
      constexpr std::int64_t kLowHalf = 2;  // bytes of an element, next to those of the parameter
      weight.master_bytes = kLowHalf * event.parameters[i].numel();
    }
    if (!can_sample(updated)) continue;
    places.push_back(found->second);
    weight.updated = updated;
    const bool is_master = model.find(updated) == nullptr;
    weight.master_bytes = is_master ? static_cast<std::int64_t>(updated.nbytes()) : 0;
  }
  copy(places);
}

bool WeightTracker::has_events() const {
  return std::any_of(weights_.begin(), weights_.end(),
                     [](const Weight& weight) { return weight.is_named; });
}

bool WeightTracker::has_changes() const {
  return std::any_of(weights_.begin(), weights_.end(), [](const Weight& weight) {
    return weight.change.has_value() && weight.change->changed > 0;
  });
}

std::vector<std::size_t> WeightTracker::updated_places() const {
  const bool is_all = !has_events();
  std::vector<std::size_t> places;
  places.reserve(weights_.size());
  for (std::size_t i = 0; i < weights_.size(); ++i)
    if (is_all || weights_[i].is_named) places.push_back(i);
  return places;
}

std::vector<at::Tensor> WeightTracker::values_of(const std::vector<std::size_t>& places) const {
  std::vector<at::Tensor> parameters;
  parameters.reserve(places.size());
  for (const std::size_t place : places) parameters.push_back(weights_[place].entry->tensor);
  std::vector<at::Tensor> values = exact_values_of(parameters);
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (weights_[places[i]].updated.defined()) {
      values[i] = weights_[places[i]].updated;
    } else if (!values[i].defined() && !weights_[places[i]].is_split) {
      values[i] = parameters[i];
    }
  }
  return values;
}

void WeightTracker::copy(const std::vector<std::size_t>& places) {
  const std::vector<at::Tensor> values = values_of(places);
  for (std::size_t i = 0; i < places.size(); ++i)
    if (values[i].defined()) weights_[places[i]].before = fp32_copy(values[i]);
}

void WeightTracker::compare() {
  const std::vector<std::size_t> places = updated_places();
  const std::vector<at::Tensor> values = values_of(places);
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (!values[i].defined()) continue;
    Weight& weight = weights_[places[i]];
    weight.change = change_of(weight.before, values[i].detach().to(at::kFloat));
  }
}

nlohmann::ordered_json WeightTracker::updates() const {
  auto updates = nlohmann::ordered_json::array();
  if (!has_events() && !has_changes()) return updates;
  for (const Weight& weight : weights_) {
    if (!weight.change.has_value()) continue;
    const WeightChange& change = *weight.change;
    updates.push_back(
        {{"name", weight.entry->name},
         {"numel", change.numel},
         {"ratio", change.ratio},
         {"changed", change.changed},
         {"master", weight.master_bytes > 0},
         {"lost", {{"Half", change.lost_in_half}, {"BFloat16", change.lost_in_bfloat16}}}});
  }
  return updates;
}

void WeightTracker::clear() {
  for (Weight& weight : weights_) weight.updated = weight.before = at::Tensor();
}

std::int64_t WeightTracker::master_bytes() const {
  std::int64_t bytes = 0;
  for (const Weight& weight : weights_) bytes += weight.master_bytes;
  return bytes;
}

}  // namespace semitone::report
