#include "src/report/sampled_tensors.h"

#include "src/report/scaled_counts.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace semitone::report {

namespace {

// Values of another dtype replace those before.
void add(std::optional<SampledValues>& all, const SampledValues& more) {
  if (all.has_value() && all->dtype == more.dtype) {
    all->counts += more.counts;
  } else {
    all = more;
  }
}

}  // namespace

SampledValues sample_of(const at::Tensor& tensor, double scale) {
  return {tensor.scalar_type(), divided_counts(tensor, scale)};
}

SampledTensors::SampledTensors(const RecordedModel& model) {
  weights_.reserve(model.parameters().size());
  for (const Entry* const entry : model.parameters()) weights_.push_back(sample_of(entry->tensor));
}

bool SampledTensors::is_differentiated(const OutputKey& key) const {
  return std::any_of(outputs_.begin(), outputs_.end(), [&](const Output& output) {
    return output.is_differentiated && output.layer() == key.parameter->layer;
  });
}

void SampledTensors::add_output(const OutputKey& key, const SampledValues& values,
                                bool is_differentiated) {
  if (is_differentiated) {
    std::erase_if(outputs_, [&](const Output& output) {
      return !output.is_differentiated && output.layer() == key.parameter->layer;
    });
  }
  auto found = std::find_if(outputs_.begin(), outputs_.end(),
                            [&](const Output& output) { return output.key == key; });
  if (found == outputs_.end()) found = outputs_.insert(found, {key, is_differentiated});
  found->last_call = ++output_calls_;
  add(found->values, values);
}

void SampledTensors::add_output_gradient(const OutputKey& key, const SampledValues& values) {
  for (Output& output : outputs_)
    if (output.key == key) add(output.gradient, values);
}

std::vector<const SampledTensors::Output*> SampledTensors::last_outputs() const {
  std::vector<const Output*> last;
  last.reserve(outputs_.size());
  for (const Output& output : outputs_) {
    const auto same = std::find_if(last.begin(), last.end(), [&](const Output* other) {
      return other->layer() == output.layer();
    });
    if (same == last.end()) {
      last.push_back(&output);
    } else if ((*same)->last_call < output.last_call) {
      *same = &output;
    }
  }
  return last;
}

void SampledTensors::add_gradient(const Entry& parameter,
                                  const std::optional<SampledValues>& values, std::int64_t bytes) {
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
  const auto describe = [&](std::string_view what, const std::string& name,
                            const SampledValues& values) {
    tensors.push_back(describe_counts(what, name, values.dtype, values.counts));
  };
  for (std::size_t i = 0; i < weights_.size(); ++i)
    describe("weight", model.parameters()[i]->name, weights_[i]);
  for (const Entry* const entry : model.parameters()) {
    const auto found = gradients_.find(entry);
    if (found != gradients_.end() && found->second.values.has_value())
      describe("gradient", entry->name, *found->second.values);
  }
  const std::vector<const Output*> outputs = last_outputs();
  for (const Output* const output : outputs)
    if (output->values.has_value()) describe("output", output->layer(), *output->values);
  if (!output_scale.has_value()) return tensors;
  for (const Output* const output : outputs) {
    if (!output->gradient.has_value()) continue;
    const SampledValues& values = *output->gradient;
    describe("output_gradient", output->layer(),
             {values.dtype, divided(values.counts, *output_scale)});
  }
  return tensors;
}

}  // namespace semitone::report
