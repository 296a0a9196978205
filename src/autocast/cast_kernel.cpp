#include "src/autocast/cast_kernel.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/autocast/attention_scores.h"
#include "src/autocast/custom_backward.h"
#include "src/autocast/op_names.h"
#include "src/autocast/operator_lists.h"
#include "src/autocast/presets/presets.h"
#include "src/core/running_statistics.h"
#include "src/nn/batch_norm_mark.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <typeinfo>
#include <vector>

namespace semitone::amp {

namespace {

// Running statistics of 16 bits that an operator in fp32 updates in copies.
class StatisticsInFp32 {
 public:
  // @param places  of the statistics among the arguments
  StatisticsInFp32(std::span<const c10::IValue> arguments, std::span<const std::size_t> places) {
    for (const std::size_t place : places) {
      const c10::IValue& value = arguments[place];
      if (value.isTensor() && value.toTensor().defined())
        own_.push_back({place, value.toTensor(), {}});
    }
  }

  // Call when the arguments have been converted, and when the operator has run.
  void note_copies(std::span<const c10::IValue> arguments) {
    for (Statistic& each : own_) each.copy = arguments[each.place].toTensor();
  }
  void write_back() const {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    for (const Statistic& each : own_)
      if (!each.copy.is_same(each.own)) each.own.copy_(each.copy);
  }

 private:
  struct Statistic {
    std::size_t place;
    at::Tensor own;
    at::Tensor copy;
  };
  std::vector<Statistic> own_;
};

bool has_batch_norm_mark(std::span<const c10::IValue> arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& value) {
    return value.isTensor() && nn::batch_norm_mark(value.toTensor()) != nullptr;
  });
}

// Whether this thread computes a derivative by LibTorch's formulas, or by a graph that TorchScript
// derived. Their dtypes are those of the forward pass: a product in the derivative of an operator
// that ran in fp32 is in fp32. (torch::autograd::Functions have nodes of other types.)
bool in_derivative_formula() {
  if (torch::autograd::get_current_graph_task_id() == -1) return false;
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return false;
  const torch::autograd::Node& running = *node;
  // As the Itanium C++ ABI writes the namespaces torch::autograd::generated and torch::jit, and
  // torch::autograd::CopySlices, which calls the node of an operator that wrote to a view.
  const std::string_view type = typeid(running).name();
  return type.starts_with("N5torch8autograd9generated") || type.starts_with("N5torch3jit") ||
         type == "N5torch8autograd10CopySlicesE";
}

}  // namespace

CastKernel::CastKernel(const c10::OperatorHandle& op, OpId id, c10::DeviceType device,
                       c10::DispatchKey key)
    : id_(id),
      device_(device),
      name_(display_name(op.operator_name())),
      is_aten_(is_aten(op.operator_name())),
      is_script_cast_(std::find(kScriptCasts.begin(), kScriptCasts.end(), name_) !=
                      kScriptCasts.end()),
      is_bmm_(name_ == "bmm"),
      widens_mixed_(is_aten_ && is_one_of(name_, kWidensMixed)),
      lacks_16bit_(is_aten_ && (is_one_of(name_, kLack16Bits) ||
                                is_one_of(name_, presets::without_16bit_kernels()))),
      is_recurrent_(is_aten_ && is_one_of(name_, kRecurrent)),
      follows_weights_(is_aten_ && is_one_of(name_, kFollowWeights)),
      fp8_(is_aten_ ? Fp8Operator::find(name_) : std::nullopt),
      compute_(op, name_, device, key) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "dtype" && is_aten_) dtype_argument_ = i;
    if (!writes_to_argument(op) && is_running_statistic(name_, arguments[i].name()))
      statistics_.push_back(i);
  }
}

void CastKernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                            Stack* stack) const {
  const Regions* regions = Regions::current();
  const Regions::Region* region = regions == nullptr ? nullptr : regions->find(device_);
  if (region == nullptr || region->policy == nullptr) {
    compute_.run_stock(op, keys, stack);
    return;
  }
  const CompiledPolicy& policy = *region->policy;
  const std::size_t count = op.schema().arguments().size();
  const std::span<c10::IValue> arguments(stack->data() + (stack->size() - count), count);
  if (is_script_cast_) {
    torch::jit::drop(*stack, count - 1);  // what remains is the tensor itself
    return;
  }
  if (in_derivative_formula()) {
    compute_.run_uncast(op, keys, stack);
    return;
  }

  if (!c10::GradMode::is_enabled()) custom_backward::see_operator_without_gradients();
  // fp32 that meets 16 bits in a product is lowered.
  const bool may_be_scores = is_bmm_ && (policy.casts() || policy.lowers_mixed()) &&
                             attention_scores::may_follow(arguments);
  run(op, keys, stack, arguments, *regions, policy);
  if (may_be_scores) attention_scores::remember(stack->back().toTensor());
}

namespace {

void round_results(const c10::OperatorHandle& op, c10::ScalarType dtype, torch::jit::Stack* stack) {
  const std::size_t count = op.schema().returns().size();
  replace_tensors({stack->data() + (stack->size() - count), count}, [&](const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat ? tensor.to(dtype) : tensor;
  });
}

}  // namespace

void CastKernel::run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                     Arguments arguments, const Regions& regions,
                     const CompiledPolicy& policy) const {
  std::optional<DisableFp8> no_fp8;
  if (is_recurrent_ && policy.fp8() != nullptr) no_fp8.emplace();
  std::optional<CastAction> action = policy.action(id_);
  if (policy.keeps_operator(id_) && has_kept_argument(arguments, policy)) action = CastAction::fp32;
  if (belongs_to_stock(action, arguments, policy)) {
    compute_.run_stock(op, keys, stack);
    return;
  }
  compute_.avoid_faults(arguments, policy);
  const Caster cast(regions, policy, name_);
  const FastKernel* const fast = compute_.fast_kernel(policy, id_);
  switch (without_promotion(action.value_or(CastAction::leave), arguments, policy)) {
    case CastAction::lower: {
      if (compute_.multiplies_sparse(arguments)) {
        run_in_fp32(op, keys, stack, arguments, cast, fast);
        return;
      }
      const auto dtype = policy.dtype();
      if (run_in_fp8(op, keys, stack, arguments, policy, dtype)) return;
      const bool emulated =
          compute_.product().has_value() && compute_.goes_through_fp32(arguments, policy, dtype);
      run_lowered(op, keys, stack, arguments, cast, dtype, emulated, emulated ? nullptr : fast);
      return;
    }
    case CastAction::fp32:
      run_in_fp32(op, keys, stack, arguments, cast, fast);
      return;
    case CastAction::ban:
      refuse_16bit(op, arguments, policy);
      [[fallthrough]];
    default:
      run_uncast(op, keys, stack, arguments, cast, policy, fast);
  }
}

void CastKernel::run_lowered(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                             Arguments arguments, const Caster& cast, c10::ScalarType dtype,
                             bool emulated, const FastKernel* fast) const {
  const Conversion conversion = conversion_to(dtype, emulated);
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  // With running statistics, parameters keep their dtype as they do.
  replace_tensors(statistics_.empty() ? arguments : arguments.first(1),
                  [&](const at::Tensor& tensor) { return cast.convert(tensor, conversion); });
  compute_.run(op, keys, stack, arguments, fast);
  if (!emulated) return;
  round_results(op, dtype, stack);
  events::emit(events::OperatorReplaced{name_, "emulated"});
}

bool CastKernel::run_in_fp8(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                            Arguments arguments, const CompiledPolicy& policy,
                            c10::ScalarType dtype) const {
  if (!fp8_.has_value() || policy.fp8() == nullptr) return false;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  bool computed = false;
  const auto compute = [&] {
    computed = true;
    compute_.run(op, keys, stack, arguments, /*fast=*/nullptr);
    return torch::jit::pop(*stack).toTensor();
  };
  const at::Tensor result = fp8_product(*fp8_, policy.fp8(), {name_, arguments, dtype, compute});
  if (!result.defined()) return false;
  if (!computed) torch::jit::drop(*stack, arguments.size());
  stack->emplace_back(result);
  return true;
}

void CastKernel::run_in_fp32(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                             Arguments arguments, const Caster& cast,
                             const FastKernel* fast) const {
  if (fast != nullptr && fast->widens &&
      ComputeKernels::run_fast(fast, arguments, stack, /*widen=*/true))
    return;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  StatisticsInFp32 statistics(arguments, statistics_);
  // For some orders linalg_matrix_norm refuses 16-bit arguments, whatever its dtype.
  const bool casts_anyway = dtype_argument_.has_value() && arguments[*dtype_argument_].isNone() &&
                            name_.starts_with("linalg_matrix_norm");
  if (dtype_argument_.has_value() && !casts_anyway) {
    c10::IValue& dtype = arguments[*dtype_argument_];
    const c10::IValue& first = arguments[0];
    if (dtype.isNone() && first.isTensor() && is_eligible(first.toTensor(), device_)) {
      cast.converts_to_fp32(first.toTensor());
      dtype = static_cast<std::int64_t>(at::kFloat);
    }
  } else {
    // A synchronised layer is known by its own weight and running mean.
    const bool is_marked = !statistics_.empty() && has_batch_norm_mark(arguments);
    replace_tensors(is_marked ? arguments.first(1) : arguments,
                    [&](const at::Tensor& tensor) { return cast.to_fp32(tensor); });
  }
  statistics.note_copies(arguments);
  compute_.run(op, keys, stack, arguments, fast);
  statistics.write_back();
}

void CastKernel::run_uncast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                            Arguments arguments, const Caster& cast, const CompiledPolicy& policy,
                            const FastKernel* fast) const {
  if ((is_recurrent_ || follows_weights_) && policy.lowers_mixed()) lower_mixed(arguments, cast);
  if (policy.lowers_mixed() && (lacks_16bit_ || compute_.multiplies_sparse(arguments))) {
    run_in_fp32(op, keys, stack, arguments, cast, fast);
    return;
  }
  if (fp8_.has_value() && policy.fp8() != nullptr) {
    const Dtypes dtypes(arguments, device_);
    const auto dtype = policy.lowers_mixed() && dtypes.mixed_16bit().has_value()
                           ? dtypes.mixed_16bit()
                           : dtypes.common_16bit();
    if (dtype.has_value() && run_in_fp8(op, keys, stack, arguments, policy, *dtype)) return;
  }
  std::optional<c10::ScalarType> mixed;
  const auto& product = compute_.product();
  if (product.has_value() && (!product->is_composite || product->has_steps)) {
    const Dtypes dtypes(arguments, device_);
    const auto dtype = dtypes.common_16bit();
    // The policy's dtype differs, so the parts of a composite operator are cast one by one.
    const bool is_whole = !product->is_composite || dtype == policy.dtype();
    if (dtype.has_value() && is_whole && compute_.goes_through_fp32(arguments, policy, *dtype)) {
      run_lowered(op, keys, stack, arguments, cast, *dtype, /*emulated=*/true);
      return;
    }
    if (policy.lowers_mixed() && !product->is_composite) mixed = dtypes.mixed_16bit();
  }
  if (widens_mixed_ && policy.lowers_mixed() &&
      Dtypes(arguments, device_).mixed_16bit().has_value()) {
    run_in_fp32(op, keys, stack, arguments, cast, fast);
    return;
  }
  if (ComputeKernels::run_fast(fast, arguments, stack)) return;
  if (mixed.has_value()) {
    // A result of a kept parameter, on its way through the other weights.
    const bool emulated = compute_.goes_through_fp32(arguments, policy, *mixed);
    run_lowered(op, keys, stack, arguments, cast, *mixed, emulated);
    return;
  }
  compute_.run_uncast(op, keys, stack);
}

void CastKernel::lower_mixed(Arguments arguments, const Caster& cast) const {
  const c10::IValue& first = arguments[0];
  if (follows_weights_ && !(first.isTensor() && first.toTensor().scalar_type() == at::kFloat))
    return;
  const auto mixed = Dtypes(arguments, device_).mixed_16bit();
  if (!mixed.has_value()) return;
  const Conversion conversion = conversion_to(*mixed, /*emulated=*/false);
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  replace_tensors(statistics_.empty() ? arguments : arguments.first(1),
                  [&](const at::Tensor& tensor) { return cast.convert(tensor, conversion); });
}

bool CastKernel::belongs_to_stock(std::optional<CastAction> action, Arguments arguments,
                                  const CompiledPolicy& policy) const {
  if (!compute_.has_stock()) return false;
  if (!action.has_value()) return policy.casts() && (policy.as_libtorch() || !is_aten_);
  if (*action == CastAction::lower) return name_ == kCudnnRnn;
  if (!policy.as_libtorch()) return false;
  if (*action == CastAction::promote) {
    const Dtypes dtypes(arguments, device_);
    return policy.dtype() == at::kHalf ? dtypes.bf16 : dtypes.fp16;
  }
  return *action == CastAction::ban;
}

CastAction CastKernel::without_promotion(CastAction action, Arguments arguments,
                                         const CompiledPolicy& policy) const {
  if (action != CastAction::promote && action != CastAction::widest) return action;
  Dtypes dtypes(arguments, device_);
  if (action == CastAction::promote)
    (policy.dtype() == at::kHalf ? dtypes.fp16 : dtypes.bf16) = true;
  const auto widest = dtypes.widest();
  if (widest == policy.dtype()) return CastAction::lower;
  return widest == at::kFloat ? CastAction::fp32 : CastAction::leave;
}

bool CastKernel::has_kept_argument(Arguments arguments, const CompiledPolicy& policy) {
  bool found = false;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    found = found || (tensor.defined() && policy.keeps_fp32(tensor));
  });
  return found;
}

void CastKernel::refuse_16bit(const c10::OperatorHandle& op, Arguments arguments,
                              const CompiledPolicy& policy) const {
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!is_eligible(tensor, device_) || !is_16bit(tensor.scalar_type())) return;
    const char* const edit = writes_to_argument(op) ? "leave" : "keep_fp32";
    throw Error("amp.autocast",
                "fp32 arguments for '" + name_ + "', which the policy '" +
                    std::string(policy.name()) + "' bans in 16 bits",
                dtype_name(tensor.scalar_type()),
                std::string("cast the argument with .to(torch::kFloat), or change the row: "
                            "policy.") +
                    edit + "(\"" + name_ + "\")");
  });
}

c10::KernelFunction make_cast_kernel(const c10::OperatorHandle& op, OpId id, c10::DeviceType device,
                                     c10::DispatchKey key) {
  return c10::KernelFunction::makeFromBoxedFunctor<CastKernel>(
      std::make_unique<CastKernel>(op, id, device, key));
}

}  // namespace semitone::amp
