#include "src/autocast/caster.h"

#include "semitone/core/dtype.h"
#include "semitone/core/events.h"
#include "src/nn/convert.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <typeinfo>

namespace semitone::amp {
namespace {

bool is_emulated(Conversion conversion) {
  return conversion == Conversion::fp32_by_fp16 || conversion == Conversion::fp32_by_bf16;
}

// The 16-bit dtype of the results, also if they are emulated in fp32.
c10::ScalarType rounded_to(Conversion conversion) {
  return conversion == Conversion::fp16 || conversion == Conversion::fp32_by_fp16 ? at::kHalf
                                                                                  : at::kBFloat16;
}

at::Tensor rounded_through(const at::Tensor& tensor, c10::ScalarType dtype) {
  if (tensor.scalar_type() == at::kFloat) return nn::round_to(tensor, dtype);
  return nn::convert(nn::convert(tensor, dtype), at::kFloat);
}

at::Tensor converted(const at::Tensor& tensor, Conversion conversion) {
  switch (conversion) {
    case Conversion::fp16:
      return nn::convert(tensor, at::kHalf);
    case Conversion::bf16:
      return nn::convert(tensor, at::kBFloat16);
    case Conversion::fp32_by_fp16:
      return rounded_through(tensor, at::kHalf);
    case Conversion::fp32_by_bf16:
      return rounded_through(tensor, at::kBFloat16);
  }
  return tensor;
}

// Whether the gradient of a view goes to the weight itself, through LibTorch's transposition and
// nothing else: neither a function of the program's own that returns such a view, nor a hook.
bool passes_gradient_on(const at::Tensor& view, const at::Tensor& weight) {
  namespace generated = torch::autograd::generated;
  const auto& node = view.grad_fn();
  if (!node || view.retains_grad() || !torch::autograd::impl::hooks(view).empty() ||
      !node->pre_hooks().empty() || !node->post_hooks().empty())
    return false;
  const torch::autograd::Node& ran = *node;
  const std::type_info& type = typeid(ran);
  return (type == typeid(generated::TBackward0) || type == typeid(generated::TransposeBackward0) ||
          type == typeid(generated::PermuteBackward0)) &&
         node->next_edge(0).function == torch::autograd::impl::try_get_grad_accumulator(weight);
}

// Whether a tensor is weight.t() and nothing else: torch::nn::Linear passes its weight in this form
// to addmm and matmul. A view that was made under no_grad passes no gradient to the weight, so it
// counts only if no gradient is needed.
bool is_transposed(const at::Tensor& view, const at::Tensor& weight) {
  return view.dim() == 2 && weight.dim() == 2 && view.is_alias_of(weight) &&
         view.size(0) == weight.size(1) && view.size(1) == weight.size(0) &&
         view.stride(0) == weight.stride(1) && view.stride(1) == weight.stride(0) &&
         view.storage_offset() == weight.storage_offset() &&
         view.scalar_type() == weight.scalar_type() && view.is_neg() == weight.is_neg() &&
         !view._fw_grad(/*level=*/0).defined() &&
         (!c10::GradMode::is_enabled() || (!view.requires_grad() && !weight.requires_grad()) ||
          passes_gradient_on(view, weight));
}

}  // namespace

bool is_eligible(const at::Tensor& tensor, c10::DeviceType device) {
  if (!tensor.defined() || tensor.device().type() != device) return false;
  const auto dtype = tensor.scalar_type();
  return dtype == at::kFloat || is_16bit(dtype);
}

Conversion conversion_to(c10::ScalarType lower, bool emulated) {
  if (lower == at::kHalf) return emulated ? Conversion::fp32_by_fp16 : Conversion::fp16;
  return emulated ? Conversion::fp32_by_bf16 : Conversion::bf16;
}

Caster::Caster(const Regions& regions, const CompiledPolicy& policy, std::string_view op)
    : cache_(*regions.cache), policy_(policy), op_(op), listening_(events::listening()) {}

at::Tensor Caster::convert(const at::Tensor& tensor, Conversion conversion) const {
  if (!is_eligible(tensor, policy_.device())) return tensor;
  const auto from = tensor.scalar_type();
  const auto lower = rounded_to(conversion);
  if (!is_emulated(conversion) && from == lower) return tensor;
  bool hit = false;
  at::Tensor result = through_cache(tensor, conversion, &hit);
  if (listening_) {
    const auto to = is_emulated(conversion) && from != at::kFloat ? at::kFloat : lower;
    events::emit(events::Cast{op_, from, to, tensor.numel(), hit});
  }
  return result;
}

at::Tensor Caster::to_fp32(const at::Tensor& tensor) const {
  if (!is_eligible(tensor, policy_.device()) || tensor.scalar_type() == at::kFloat) return tensor;
  converts_to_fp32(tensor);
  return nn::convert(tensor, at::kFloat);
}

void Caster::converts_to_fp32(const at::Tensor& tensor) const {
  if (!listening_ || !is_16bit(tensor.scalar_type())) return;
  events::emit(events::Cast{op_, tensor.scalar_type(), at::kFloat, tensor.numel(), false});
}

// A weight is a tensor that is trained, or to which the policy was bound. A copy would not have its
// tangent.
bool Caster::is_weight(const at::Tensor& tensor) const {
  return (tensor.requires_grad() || policy_.is_parameter(tensor)) &&
         !tensor._fw_grad(/*level=*/0).defined() && CastCache::can_keep(tensor);
}

at::Tensor Caster::through_cache(const at::Tensor& tensor, Conversion conversion, bool* hit) const {
  const auto cached = [&](const at::Tensor& weight) {
    return cache_.get(weight, conversion, hit,
                      [&](const at::Tensor& missing) { return converted(missing, conversion); });
  };
  if (is_weight(tensor)) return cached(tensor);
  if (tensor.is_view()) {
    const at::Tensor base(tensor._base());
    if (is_weight(base) && is_transposed(tensor, base)) return cached(base).t();
  }
  return converted(tensor, conversion);
}

}  // namespace semitone::amp
