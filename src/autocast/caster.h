#pragma once

#include "src/autocast/cast_cache.h"
#include "src/autocast/compiled_policy.h"
#include "src/autocast/regions.h"

#include <string_view>

namespace semitone::amp {

// Whether autocast casts a tensor: fp32, fp16 and bf16 tensors on the region's device.
bool is_eligible(const at::Tensor& tensor, c10::DeviceType device);

// To this 16-bit dtype; emulated: and back to fp32, rounded.
Conversion conversion_to(c10::ScalarType lower, bool emulated);

// Converts the arguments of one call under one region: weights through the region's cache, with an
// event for each conversion. Holds references to its constructor's arguments.
class Caster {
 public:
  Caster(const Regions& regions, const CompiledPolicy& policy, std::string_view op);

  // Returns a tensor unchanged if it is not eligible or has the dtype already.
  at::Tensor convert(const at::Tensor& tensor, Conversion conversion) const;
  at::Tensor to_fp32(const at::Tensor& tensor) const;

  // Notifies listeners that the operator itself converts this argument to fp32.
  void converts_to_fp32(const at::Tensor& tensor) const;

 private:
  at::Tensor through_cache(const at::Tensor& tensor, Conversion conversion, bool* hit) const;
  bool is_weight(const at::Tensor& tensor) const;

  CastCache& cache_;
  const CompiledPolicy& policy_;
  std::string_view op_;
  bool listening_;
};

}  // namespace semitone::amp
