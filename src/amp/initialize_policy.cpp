#include "src/amp/initialize_policy.h"

#include "semitone/core/dtype.h"
#include "src/autocast/presets/presets.h"
#include "src/scaling/gradients.h"

#include <torch/nn/modules/activation.h>

#include <algorithm>
#include <string>
#include <string_view>

namespace semitone::amp {
namespace {

// Whether views of channels-last tensors that LibTorch refuses copy instead.
bool has_view_kernel(const std::optional<CastPolicy>& policy) {
  return policy.has_value() && policy->fast_kernels().contains("view");
}

// Whether the models contain LibTorch's attention, whose padding needs a region
// (src/autocast/attention_scores.h).
bool has_attention(const std::vector<Model>& models) {
  return std::any_of(models.begin(), models.end(), [](const Model& model) {
    const torch::nn::Module* const whole = model.module();
    if (whole == nullptr) return false;
    const auto is_attention = [](const torch::nn::Module* module) {
      return dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(module) != nullptr;
    };
    const auto parts = whole->modules(/*include_self=*/false);
    return is_attention(whole) || std::any_of(parts.begin(), parts.end(), [&](const auto& part) {
             return is_attention(part.get());
           });
  });
}

}  // namespace

std::optional<CastPolicy> policy_for(const std::vector<Model>& models,
                                     const Properties& properties) {
  if (!properties.enabled) return std::nullopt;
  const CastTarget target(properties.device, properties.dtype);
  const CastPolicy given =
      properties.policy.value_or(CastPolicy::semitone(target)).with_target(target);
  if (properties.patch_torch_functions) return given.bind(models);
  const auto& type = properties.cast_model_type;
  if (!type.has_value() || !is_16bit(*type)) return std::nullopt;
  // 16-bit weights: the region emulates what the CPU lacks, casts for parameters that stay fp32,
  // lowers fp32 arguments that meet 16-bit weights, and computes losses in fp32.
  CastPolicy weights_only =
      CastPolicy::none(target).emulation(given.emulation()).fast_kernels(false);
  weights_only.fast_kernels_on_gpu(given.fast_kernels_on_gpu());
  for (const std::string& op : given.fast_kernels()) weights_only.fast_kernel(op);
  for (const std::string& glob : given.fp32_param_globs()) weights_only.keep_fp32_params(glob);
  if (given.fp8_options().has_value()) weights_only.fp8(*given.fp8_options());
  // forward() returns fp32, so losses outside of it are in fp32. In autocast()'s region models return
  // 16 bits.
  for (const std::string_view op : presets::losses()) {
    weights_only.keep_fp32(op, presets::reason(CastAction::fp32, op));
  }
  return weights_only.bind(models);
}

bool runs_in_region(const Properties& properties, const std::optional<CastPolicy>& policy,
                    const std::vector<Model>& models) {
  const bool views =
      properties.memory_format == c10::MemoryFormat::ChannelsLast && has_view_kernel(policy);
  return policy.has_value() &&
         (properties.patch_torch_functions || properties.device == c10::DeviceType::CPU || views ||
          policy->fast_kernels_on_gpu() || !policy->fp32_param_globs().empty() ||
          policy->fp8_options().has_value() || has_attention(models));
}

c10::MemoryFormat choose_memory_format(const std::vector<at::Tensor>& weights,
                                       const OptimizerRefs& optimizers, OptLevel opt_level,
                                       const std::optional<CastPolicy>& policy) {
  // LBFGS views gradients as vectors.
  const bool views = std::any_of(optimizers.begin(), optimizers.end(), evaluates_loss);
  return !weights.empty() && opt_level != OptLevel::O0 && has_view_kernel(policy) && !views
             ? c10::MemoryFormat::ChannelsLast
             : c10::MemoryFormat::Preserve;
}

}  // namespace semitone::amp
