#include "src/amp/dispatch.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/amp/emulation.h"
#include "src/amp/op_names.h"
#include "src/amp/regions.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

namespace semitone::amp {
namespace {

using torch::jit::Stack;

constexpr c10::DispatchKeySet below(c10::DispatchKey key) {
  return {c10::DispatchKeySet::FULL_AFTER, key};
}

bool is_eligible(const at::Tensor& tensor, c10::DeviceType device) {
  if (!tensor.defined() || tensor.device().type() != device) return false;
  const auto dtype = tensor.scalar_type();
  return dtype == at::kFloat || is_16bit(dtype);
}

// The tensors among an operator's arguments, those in lists included.
template <typename Visit>
void for_each_tensor(at::ArrayRef<c10::IValue> arguments, Visit&& visit) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      visit(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) visit(tensor);
    }
  }
}

template <typename Convert>
void replace_tensors(c10::IValue* arguments, std::size_t count, Convert&& convert) {
  for (std::size_t i = 0; i < count; ++i) {
    c10::IValue& argument = arguments[i];
    if (argument.isTensor()) {
      const at::Tensor& before = argument.toTensor();
      if (!before.defined()) continue;
      at::Tensor after = convert(before);
      if (!after.is_same(before)) argument = std::move(after);
    } else if (argument.isTensorList()) {
      // A new list: the caller's own must not change.
      c10::List<at::Tensor> converted;
      const auto tensors = argument.toTensorVector();
      converted.reserve(tensors.size());
      for (const at::Tensor& tensor : tensors)
        converted.push_back(tensor.defined() ? convert(tensor) : tensor);
      argument = std::move(converted);
    }
  }
}

c10::ScalarType target_of(Conversion conversion) {
  switch (conversion) {
    case Conversion::fp16:
      return at::kHalf;
    case Conversion::bf16:
      return at::kBFloat16;
    case Conversion::fp32_by_fp16:
    case Conversion::fp32_by_bf16:
      return at::kFloat;
  }
  return at::kFloat;
}

Conversion conversion_to(c10::ScalarType lower, bool emulated) {
  if (lower == at::kHalf) return emulated ? Conversion::fp32_by_fp16 : Conversion::fp16;
  return emulated ? Conversion::fp32_by_bf16 : Conversion::bf16;
}

at::Tensor convert(const at::Tensor& tensor, Conversion conversion) {
  switch (conversion) {
    case Conversion::fp16:
      return tensor.to(at::kHalf);
    case Conversion::bf16:
      return tensor.to(at::kBFloat16);
    case Conversion::fp32_by_fp16:
      return tensor.to(at::kHalf).to(at::kFloat);
    case Conversion::fp32_by_bf16:
      return tensor.to(at::kBFloat16).to(at::kFloat);
  }
  return tensor;
}

// Whether a tensor is worth remembering the cast of: a weight, and one whose changes its version
// counter shows.
bool is_weight(const at::Tensor& tensor, const CompiledPolicy& policy) {
  return tensor.is_leaf() && !tensor.is_view() && !tensor.is_inference() &&
         (tensor.requires_grad() || policy.is_parameter(tensor));
}

// Whether a tensor is weight.t() and nothing else: how torch::nn::Linear passes its weight to addmm
// and matmul.
bool is_transposed(const at::Tensor& view, const at::Tensor& weight) {
  return view.dim() == 2 && weight.dim() == 2 && view.size(0) == weight.size(1) &&
         view.size(1) == weight.size(0) && view.stride(0) == weight.stride(1) &&
         view.stride(1) == weight.stride(0) && view.storage_offset() == weight.storage_offset() &&
         view.scalar_type() == weight.scalar_type() &&
         view.requires_grad() == weight.requires_grad() &&
         torch::autograd::impl::hooks(view).empty();
}

// Converts arguments of one operator call under one policy.
class Caster {
 public:
  Caster(const Regions& regions, const CompiledPolicy& policy, const std::string& op)
      : cache_(*regions.cache), policy_(policy), op_(op), listening_(events::listening()) {}

  at::Tensor operator()(const at::Tensor& tensor, Conversion conversion) const {
    if (!is_eligible(tensor, policy_.device())) return tensor;
    const c10::ScalarType target = target_of(conversion);
    if (target != at::kFloat && tensor.scalar_type() == target) return tensor;
    bool hit = false;
    const at::Tensor converted = through_cache(tensor, conversion, &hit);
    if (listening_ && tensor.scalar_type() != target) {
      events::emit(events::Cast{op_, tensor.scalar_type(), target, tensor.numel(), hit});
    }
    return converted;
  }

  at::Tensor to_fp32(const at::Tensor& tensor) const {
    if (!is_eligible(tensor, policy_.device()) || tensor.scalar_type() == at::kFloat) return tensor;
    if (listening_)
      events::emit(events::Cast{op_, tensor.scalar_type(), at::kFloat, tensor.numel(), false});
    return tensor.to(at::kFloat);
  }

 private:
  at::Tensor through_cache(const at::Tensor& tensor, Conversion conversion, bool* hit) const {
    const auto cached = [&](const at::Tensor& weight) {
      return cache_.get(weight, conversion, hit,
                        [&](const at::Tensor& missing) { return convert(missing, conversion); });
    };
    if (is_weight(tensor, policy_)) return cached(tensor);
    if (tensor.is_view()) {
      const at::Tensor base(tensor._base());
      if (is_weight(base, policy_) && is_transposed(tensor, base)) return cached(base).t();
    }
    return convert(tensor, conversion);
  }

  CastCache& cache_;
  const CompiledPolicy& policy_;
  const std::string& op_;
  bool listening_;
};

// The widest dtype of the eligible arguments and `floor`, if there is one (Undefined: none). fp16
// holds numbers that bf16 does not and the other way round: only fp32 holds both.
c10::ScalarType widest_of(at::ArrayRef<c10::IValue> arguments, c10::DeviceType device,
                          c10::ScalarType floor) {
  c10::ScalarType widest = floor;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!is_eligible(tensor, device)) return;
    const auto dtype = tensor.scalar_type();
    widest = widest == c10::ScalarType::Undefined || widest == dtype ? dtype : at::kFloat;
  });
  return widest;
}

// The 16-bit dtype that all eligible arguments have, if they share one.
std::optional<c10::ScalarType> common_16bit(at::ArrayRef<c10::IValue> arguments,
                                            c10::DeviceType device) {
  std::optional<c10::ScalarType> common;
  bool shared = true;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!is_eligible(tensor, device)) return;
    const auto dtype = tensor.scalar_type();
    shared = shared && is_16bit(dtype) && (!common.has_value() || *common == dtype);
    common = dtype;
  });
  return shared ? common : std::nullopt;
}

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(const c10::OperatorHandle& op, c10::DeviceType device, c10::DispatchKey key)
      : id_(op_id(op)),
        device_(device),
        key_(key),
        name_(display_name(op.operator_name())),
        product_(matrix_product(op)) {
    if (op.hasKernelForDispatchKey(key)) stock_ = op.getComputedKernelForDispatchKey(key);
    const auto& arguments = op.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == "dtype" && op.operator_name().name.rfind("aten::", 0) == 0)
        dtype_argument_ = i;
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const Regions* regions = Regions::current();
    const Regions::Region* region = regions == nullptr ? nullptr : regions->find(device_);
    if (region == nullptr || region->policy == nullptr) {
      as_stock(op, keys, stack);
      return;
    }
    const CompiledPolicy& policy = *region->policy;
    const std::size_t count = op.schema().arguments().size();
    c10::IValue* arguments = stack->data() + (stack->size() - count);
    const at::ArrayRef<c10::IValue> view(arguments, count);
    const Caster cast(*regions, policy, name_);

    CastAction action = policy.action(id_);
    if (policy.keeps_any_fp32()) {
      for_each_tensor(view, [&](const at::Tensor& tensor) {
        if (tensor.defined() && policy.keeps_fp32(tensor)) action = CastAction::fp32;
      });
    }
    if (action == CastAction::ban) refuse_16bit(view, policy);
    if (action == CastAction::promote || action == CastAction::widest) {
      const auto floor =
          action == CastAction::promote ? policy.dtype() : c10::ScalarType::Undefined;
      const auto widest = widest_of(view, device_, floor);
      action = widest == policy.dtype() ? CastAction::lower
               : widest == at::kFloat   ? CastAction::fp32
                                        : CastAction::leave;
    }

    if (action == CastAction::lower) {
      const bool emulated =
          product_ != MatrixProduct::none && goes_through_fp32(view, policy, policy.dtype());
      const Conversion conversion = conversion_to(policy.dtype(), emulated);
      const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
      replace_tensors(arguments, count,
                      [&](const at::Tensor& tensor) { return cast(tensor, conversion); });
      run(op, keys, stack);
      if (emulated) round_results(op, policy.dtype(), stack);
      return;
    }
    if (action == CastAction::fp32) {
      const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
      if (dtype_argument_.has_value()) {
        c10::IValue& dtype = arguments[*dtype_argument_];
        if (dtype.isNone() && view[0].isTensor() && is_eligible(view[0].toTensor(), device_)) {
          dtype = static_cast<std::int64_t>(at::kFloat);
        }
      } else {
        replace_tensors(arguments, count,
                        [&](const at::Tensor& tensor) { return cast.to_fp32(tensor); });
      }
      run(op, keys, stack);
      return;
    }
    if (product_ == MatrixProduct::primitive || product_ == MatrixProduct::convolution) {
      const auto dtype = common_16bit(view, device_);
      if (dtype.has_value() && goes_through_fp32(view, policy, *dtype)) {
        const Conversion conversion = conversion_to(*dtype, true);
        const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
        replace_tensors(arguments, count,
                        [&](const at::Tensor& tensor) { return cast(tensor, conversion); });
        run(op, keys, stack);
        round_results(op, *dtype, stack);
        return;
      }
    }
    // Not cast: the operators that this one is made of may be.
    op.redispatchBoxed(keys & below(key_), stack);
  }

 private:
  void as_stock(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    if (stock_.has_value()) {
      stock_->callBoxed(op, keys, stack);
    } else {
      op.redispatchBoxed(keys & below(key_), stack);
    }
  }

  // With the casts done, and every Autocast key excluded by the caller.
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    op.redispatchBoxed((keys & below(key_)) - c10::autocast_dispatch_keyset, stack);
  }

  bool goes_through_fp32(at::ArrayRef<c10::IValue> arguments, const CompiledPolicy& policy,
                         c10::ScalarType dtype) const {
    if (policy.emulates(dtype)) return true;
    // Every convolution operator takes (input, weight, …).
    return product_ == MatrixProduct::convolution && policy.repairs() && arguments[1].isTensor() &&
           convolves_wrongly(arguments[1].toTensor(), dtype);
  }

  static void round_results(const c10::OperatorHandle& op, c10::ScalarType dtype, Stack* stack) {
    const std::size_t count = op.schema().returns().size();
    replace_tensors(stack->data() + (stack->size() - count), count, [&](const at::Tensor& tensor) {
      return tensor.scalar_type() == at::kFloat ? tensor.to(dtype) : tensor;
    });
  }

  void refuse_16bit(at::ArrayRef<c10::IValue> arguments, const CompiledPolicy& policy) const {
    for_each_tensor(arguments, [&](const at::Tensor& tensor) {
      if (!is_eligible(tensor, device_) || !is_16bit(tensor.scalar_type())) return;
      throw Error(
          "amp.autocast",
          "fp32 arguments for '" + name_ + "', which the policy '" + std::string(policy.name()) +
              "' bans in 16 bits",
          dtype_name(tensor.scalar_type()),
          "cast the argument with .to(torch::kFloat), or change the row: policy.keep_fp32(\"" +
              name_ + "\")");
    });
  }

  OpId id_;
  c10::DeviceType device_;
  c10::DispatchKey key_;
  std::string name_;
  MatrixProduct product_;
  std::optional<std::size_t> dtype_argument_;
  std::optional<c10::SafeKernelFunction> stock_;
};

// Never destroyed: kernels may be called while the process ends.
struct Registry {
  std::mutex mutex;
  std::unordered_map<c10::OperatorName, OpId> ids;
  std::map<std::pair<OpId, c10::DeviceType>, c10::RegistrationHandleRAII> installed;
  std::map<c10::DeviceType, std::vector<std::string>> stock;
};

Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

// LibTorch warns, once a process, that a kernel is overridden: that is the purpose here.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::vector<std::string> operators_with_kernel(c10::DispatchKey key) {
  std::vector<std::string> names;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(key)) {
    if (dispatcher.findSchema(name).has_value()) names.push_back(display_name(name));
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

OpId op_id(const c10::OperatorHandle& op) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.ids.emplace(op.operator_name(), static_cast<OpId>(all.ids.size())).first->second;
}

std::vector<std::string> stock_operators(c10::DeviceType device) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  auto& names =
      all.stock[device];  // asked before the first kernel of ours is installed, see install_kernel
  if (names.empty())
    names = operators_with_kernel(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  return names;
}

void install_kernel(const c10::OperatorHandle& op, c10::DeviceType device) {
  stock_operators(device);
  const OpId id = op_id(op);
  Registry& all = registry();
  {
    const std::lock_guard lock(all.mutex);
    if (all.installed.count({id, device}) > 0) return;
  }
  const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
  auto kernel = std::make_unique<Kernel>(op, device, key);
  const std::lock_guard lock(all.mutex);
  if (all.installed.count({id, device}) > 0) return;
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  all.installed.emplace(std::pair(id, device),
                        c10::Dispatcher::singleton().registerImpl(
                            op.operator_name(), key,
                            c10::KernelFunction::makeFromBoxedFunctor<Kernel>(std::move(kernel)),
                            std::nullopt, nullptr, "semitone autocast"));
}

}  // namespace semitone::amp
