#include "src/report/sampled_tensors.h"

#include "src/report/scaled_counts.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>

namespace semitone::report {

SampledValues sample_of(const at::Tensor& tensor, double scale) {
  return {tensor.scalar_type(), divided_counts(tensor, scale)};
}

SampledTensors::SampledTensors(const RecordedModel& model) {
  weights_.reserve(model.parameters().size());
  for (const Entry* const entry : model.parameters()) weights_.push_back(sample_of(entry->tensor));
}

SampledTensors::Output* SampledTensors::output_of(const std::string& layer) {
  const auto found = std::find_if(outputs_.begin(), outputs_.end(), [&](const Output& output) {
    return output.parameter->layer == layer;
  });
  return found == outputs_.end() ? nullptr : &*found;
}

void SampledTensors::add_output(const Entry& parameter, const OperatorInfo& op,
                                const SampledValues& values) {
  Output* const output = output_of(parameter.layer);
  if (output == nullptr) {
    outputs_.push_back({&parameter, &op, values});
  } else if (output->parameter == &parameter && output->op == &op &&
             output->values.dtype == values.dtype) {
    output->values.counts += values.counts;
  } else {
    *output = {&parameter, &op, values};
  }
}

void SampledTensors::add_output_gradient(const std::string& layer, const SampledValues& values) {
  Output* const output = output_of(layer);
  if (output == nullptr) return;
  if (output->gradient.has_value() && output->gradient->dtype == values.dtype) {
    output->gradient->counts += values.counts;
  } else {
    output->gradient = values;
  }
}

void SampledTensors::add_gradient(const Entry& parameter, const SampledValues& values,
                                  std::int64_t bytes) {
  gradients_.insert_or_assign(&parameter, Gradient{values, bytes});
}

std::int64_t SampledTensors::gradient_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [parameter, gradient] : gradients_) bytes += gradient.bytes;
  return bytes;
}

nlohmann::ordered_json SampledTensors::describe(const RecordedModel& model,
                                                const std::optional<double>& output_scale) const {
  auto tensors = nlohmann::ordered_json::array();
  const auto add = [&](std::string_view what, const std::string& name,
                       const SampledValues& values) {
    tensors.push_back(describe_counts(what, name, values.dtype, values.counts));
  };
  for (std::size_t i = 0; i < weights_.size(); ++i)
    add("weight", model.parameters()[i]->name, weights_[i]);
  for (const Entry* const entry : model.parameters()) {
    const auto found = gradients_.find(entry);
    if (found != gradients_.end()) add("gradient", entry->name, found->second.values);
  }
  for (const Output& output : outputs_) add("output", output.parameter->layer, output.values);
  if (!output_scale.has_value()) return tensors;
  for (const Output& output : outputs_) {
    if (!output.gradient.has_value()) continue;
    const SampledValues& values = *output.gradient;
    add("output_gradient", output.parameter->layer,
        {values.dtype, divided(values.counts, *output_scale)});
  }
  return tensors;
}

}  // namespace semitone::report
