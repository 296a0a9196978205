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

// The tensors of a step that is looked at.
class SampledTensors {
 public:
  using Entry = RecordedModel::Entry;

  // Looks at the weights.
  explicit SampledTensors(const RecordedModel& model);

  // The output of an operator that has a layer's parameter. Several calls of one operator are
  // counted together; the output of another operator replaces that of the first.
  void add_output(const Entry& parameter, const OperatorInfo& op, const SampledValues& values);
  void add_output_gradient(const std::string& layer, const SampledValues& values);
  // The gradient that the optimizer uses replaces an earlier one.
  void add_gradient(const Entry& parameter, const SampledValues& values, std::int64_t bytes);
  bool has_gradient(const Entry& parameter) const { return gradients_.contains(&parameter); }

  std::int64_t gradient_bytes() const;

  // The list "tensors".
  // @param output_scale  a power of two that gradients of outputs are divided by; none: they are
  //                      left out
  nlohmann::ordered_json describe(const RecordedModel& model,
                                  const std::optional<double>& output_scale) const;

 private:
  struct Output {
    const Entry* parameter;
    const OperatorInfo* op;
    SampledValues values;
    std::optional<SampledValues> gradient{};
  };
  struct Gradient {
    SampledValues values;
    std::int64_t bytes;
  };
  Output* output_of(const std::string& layer);

  std::vector<SampledValues> weights_;  // in the model's order
  std::vector<Output> outputs_;         // in the order of the first calls
  std::map<const Entry*, Gradient> gradients_;
};

}  // namespace semitone::report
