#pragma once

#include "semitone/core/events.h"
#include "src/report/recorded_model.h"

#include <ATen/core/Tensor.h>

#include <nlohmann/json_fwd.hpp>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace semitone::report {

// Remembers the fp32 weights of a model before a step's update.
class WeightTracker {
 public:
  // Copies the weights: the fp32 values of 16-bit parameters, if an optimizer holds them.
  explicit WeightTracker(const RecordedModel& model);

  // An update is about to begin: copies the weights that the event names instead.
  void add(const RecordedModel& model, const events::GradientsReady& event);

  // Compares each weight with its copy.
  nlohmann::ordered_json updates() const;
  // The memory of the weights of events that are not the model's.
  std::int64_t master_bytes() const;

 private:
  struct Weight {
    const RecordedModel::Entry* entry = nullptr;
    at::Tensor updated{};  // by the optimizer, if an event named it
    at::Tensor before{};
    std::int64_t master_bytes = 0;
  };
  // The weights as they are now; perhaps of another dtype than fp32.
  std::vector<at::Tensor> values_of(const std::vector<std::size_t>& places) const;
  void copy(const std::vector<std::size_t>& places);
  std::vector<std::size_t> all() const;

  std::vector<Weight> weights_;
  std::unordered_map<const RecordedModel::Entry*, std::size_t> places_;
};

}  // namespace semitone::report
