#pragma once

#include "src/kernels/exponents.h"
#include "src/report/operator_info.h"
#include "src/report/recorded_model.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace semitone::report {

// What a sample says of the values of a tensor.
struct SampledValues {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  kernels::ExponentCounts counts{};
};

// Counts the values of a tensor for which can_sample() holds, divided by a scale.
SampledValues sample_of(const at::Tensor& tensor, double scale = 1);

// What one operator makes with one parameter of a layer.
struct OutputKey {
  const RecordedModel::Entry* parameter;
  const OperatorInfo* op;

  bool operator==(const OutputKey&) const = default;
};

// The tensors of a step that is looked at.
class SampledTensors {
 public:
  using Entry = RecordedModel::Entry;

  // Looks at the weights.
  explicit SampledTensors(const RecordedModel& model);

  // The output of an operator that has a layer's parameter. Several calls are counted together. The
  // output of a layer is that of the key that came last. Outputs made with GradMode replace those of
  // the layer made without it.
  void add_output(const OutputKey& key, const SampledValues& values, bool is_differentiated);
  void add_output_gradient(const OutputKey& key, const SampledValues& values);
  // Whether the layer of a key has outputs made with GradMode.
  bool is_differentiated(const OutputKey& key) const;
  // The gradient that the optimizer uses replaces an earlier one.
  // Without values, it counts as memory only.
  void add_gradient(const Entry& parameter, const std::optional<SampledValues>& values,
                    std::int64_t bytes);
  bool has_gradient(const Entry& parameter) const { return gradients_.contains(&parameter); }

  std::int64_t gradient_bytes() const;

  // The list "tensors".
  // @param output_scale  a power of two that gradients of outputs are divided by; none: they are
  //                      left out
  nlohmann::ordered_json describe(const RecordedModel& model,
                                  const std::optional<double>& output_scale) const;

 private:
  struct Output {
    OutputKey key;
    bool is_differentiated;
    std::int64_t last_call = 0;
    std::optional<SampledValues> values{};
    std::optional<SampledValues> gradient{};

    const std::string& layer() const { return key.parameter->layer; }
  };
  struct Gradient {
    std::optional<SampledValues> values;
    std::int64_t bytes;
  };
  // The last one of each layer, in the order of the first calls.
  std::vector<const Output*> last_outputs() const;

  std::vector<SampledValues> weights_;  // in the model's order
  std::vector<Output> outputs_;         // one a key, in the order of the first calls
  std::int64_t output_calls_ = 0;
  std::map<const Entry*, Gradient> gradients_;
};

}  // namespace semitone::report
