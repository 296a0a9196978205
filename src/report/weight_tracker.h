#pragma once

#include "semitone/core/events.h"
#include "src/report/recorded_model.h"
#include "src/report/weight_changes.h"

#include <ATen/core/Tensor.h>

#include <nlohmann/json_fwd.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace semitone::report {

// Remembers the fp32 weights of a model before a step's update. Frozen ones are left out.
class WeightTracker {
 public:
  // Copies the weights: the fp32 values of 16-bit parameters, if an optimizer holds them.
  explicit WeightTracker(const RecordedModel& model);

  // An update is about to begin: copies the weights that the event names instead.
  void add(const RecordedModel& model, const events::GradientsReady& event);

  // Compares the weights with their copies, at the end of the step: those that events name, or all
  // without events.
  void compare();
  // Whether an event named a weight.
  bool has_events() const;
  // Whether compare() found a change.
  bool has_changes() const;
  // What compare() found. Nothing without events and changes: no optimizer made a step.
  nlohmann::ordered_json updates() const;
  // Lets go of the copies and of what events named.
  void clear();
  // The memory of the weights of events that are not the model's.
  std::int64_t master_bytes() const;

 private:
  struct Weight {
    const RecordedModel::Entry* entry = nullptr;
    bool is_named = false;  // by an event
    bool is_split = false;  // the event has no weight: the optimizer keeps it as two halves
    at::Tensor updated{};   // by the optimizer, if the event has it
    at::Tensor before{};
    std::optional<WeightChange> change{};
    std::int64_t master_bytes = 0;
  };
  // The weights as they are now; perhaps of another dtype than fp32. Not defined where only the
  // optimizer knows them.
  std::vector<at::Tensor> values_of(const std::vector<std::size_t>& places) const;
  void copy(const std::vector<std::size_t>& places);
  // Those that events name, or all without events.
  std::vector<std::size_t> updated_places() const;

  std::vector<Weight> weights_;
  std::unordered_map<const RecordedModel::Entry*, std::size_t> places_;
};

}  // namespace semitone::report
