#include "src/amp/dispatch.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/amp/attention_scores.h"
#include "src/amp/caster.h"
#include "src/amp/custom_backward.h"
#include "src/amp/emulation.h"
#include "src/amp/fast_kernels.h"
#include "src/amp/op_names.h"
#include "src/amp/presets/presets.h"
#include "src/amp/regions.h"
#include "src/nn/plain.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

namespace semitone::amp {
namespace {

using torch::jit::Stack;

// cuDNN's recurrent networks: LibTorch's own kernel rebuilds cuDNN's flat weight buffer, so a plain
// cast of the arguments would not be sufficient.
constexpr std::string_view kCudnnRnn = "_cudnn_rnn";

// TorchScript has its own autocast: when it compiles a function inside a region, it writes these
// casts into the graph, from its own list. In Semitone's regions they do nothing, so that the
// policy decides.
constexpr std::array<std::string_view, 2> kScriptCasts{"_autocast_to_full_precision",
                                                       "_autocast_to_reduced_precision"};

// Operators that LibTorch refuses for arguments of two floating dtypes, where a model with 16-bit
// weights may pass fp32: a grid, an index, a target. They compute in fp32 then.
constexpr std::array<std::string_view, 9> kWidensMixed{
    "bilinear",  "dot",         "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "index_copy",
    "index_put", "scatter_add", "vdot"};
// In a model with 16-bit weights these compute, and return, fp32, as do those of
// presets::without_16bit_kernels(): LibTorch's CPU has no 16-bit kernels of them either, or
// (matrix_exp in LibTorch 2.11) wrong ones.
constexpr std::array<std::string_view, 14> kLack16Bits{"complex",
                                                       "det",
                                                       "istft",
                                                       "linalg_det",
                                                       "linalg_lu",
                                                       "linalg_lu_factor",
                                                       "linalg_lu_solve",
                                                       "linalg_matrix_exp",
                                                       "linalg_pinv",
                                                       "linalg_slogdet",
                                                       "linalg_solve_triangular",
                                                       "logdet",
                                                       "matrix_exp",
                                                       "slogdet"};
// Operators that check for a single dtype before they reach the matrix products inside them.
// (lstm.input and lstm.data; gru_cell; …)
constexpr std::array<std::string_view, 8> kRecurrent{"gru",       "gru_cell",     "lstm",
                                                     "lstm_cell", "rnn_relu",     "rnn_relu_cell",
                                                     "rnn_tanh",  "rnn_tanh_cell"};
// Operators that accept 16-bit arguments with fp32 weights, but not fp32 with 16-bit weights.
constexpr std::array<std::string_view, 2> kRowNorms{"layer_norm", "rms_norm"};

bool is_one_of(std::string_view op, std::span<const std::string_view> names) {
  return std::any_of(names.begin(), names.end(), [op](std::string_view name) {
    return op.starts_with(name) && (op.size() == name.size() || op[name.size()] == '.');
  });
}

constexpr c10::DispatchKeySet below(c10::DispatchKey key) {
  return {c10::DispatchKeySet::FULL_AFTER, key};
}

// The tensors among an operator's arguments, those in lists included.
template <typename Visit>
void for_each_tensor(std::span<const c10::IValue> arguments, Visit&& visit) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      visit(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) visit(tensor);
    }
  }
}

template <typename Convert>
void replace_tensors(std::span<c10::IValue> arguments, Convert&& convert) {
  for (c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      const at::Tensor& before = argument.toTensor();
      if (!before.defined()) continue;
      at::Tensor after = convert(before);
      if (!after.is_same(before)) argument = std::move(after);
    } else if (argument.isTensorList()) {
      // A new list: the caller's own list must not change.
      c10::List<at::Tensor> converted;
      const auto tensors = argument.toTensorVector();
      converted.reserve(tensors.size());
      for (const at::Tensor& tensor : tensors)
        converted.push_back(tensor.defined() ? convert(tensor) : tensor);
      argument = std::move(converted);
    }
  }
}

// The common properties of the eligible arguments of a call.
struct Dtypes {
  Dtypes(std::span<const c10::IValue> arguments, c10::DeviceType device) {
    for_each_tensor(arguments, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_floating_point()) return;
      if (!is_eligible(tensor, device)) {
        foreign = true;
      } else {
        fp32 = fp32 || tensor.scalar_type() == at::kFloat;
        fp16 = fp16 || tensor.scalar_type() == at::kHalf;
        bf16 = bf16 || tensor.scalar_type() == at::kBFloat16;
      }
    });
  }

  // fp16 and bf16 each represent numbers that the other cannot; only fp32 represents both.
  c10::ScalarType widest() const {
    if (fp32 || (fp16 && bf16)) return at::kFloat;
    return fp16 ? at::kHalf : bf16 ? at::kBFloat16 : c10::ScalarType::Undefined;
  }
  // The one 16-bit dtype of all floating-point arguments.
  std::optional<c10::ScalarType> common_16bit() const {
    const auto dtype = widest();
    return !foreign && is_16bit(dtype) ? std::optional(dtype) : std::nullopt;
  }

  // The one 16-bit dtype that occurs together with fp32.
  std::optional<c10::ScalarType> mixed_16bit() const {
    if (foreign || !fp32 || fp16 == bf16) return std::nullopt;
    return fp16 ? at::kHalf : at::kBFloat16;
  }

  bool fp32 = false;
  bool fp16 = false;
  bool bf16 = false;
  bool foreign = false;  // fp64, fp8, or on another device
};

// Whether an argument is sparse: LibTorch's CPU kernels of sparse products know fp32 and fp64.
bool has_sparse(std::span<const c10::IValue> arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
    return argument.isTensor() && argument.toTensor().defined() &&
           argument.toTensor().layout() != at::kStrided;
  });
}

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(const c10::OperatorHandle& op, OpId id, c10::DeviceType device, c10::DispatchKey key)
      : id_(id),
        device_(device),
        key_(key),
        name_(display_name(op.operator_name())),
        is_aten_(is_aten(op.operator_name())),
        is_script_cast_(std::find(kScriptCasts.begin(), kScriptCasts.end(), name_) !=
                        kScriptCasts.end()),
        is_bmm_(name_ == "bmm"),
        product_(matrix_product(op)),
        widens_mixed_(is_aten_ && is_one_of(name_, kWidensMixed)),
        lacks_16bit_(is_aten_ && (is_one_of(name_, kLack16Bits) ||
                                  is_one_of(name_, presets::without_16bit_kernels()))),
        is_recurrent_(is_aten_ && is_one_of(name_, kRecurrent)),
        is_row_norm_(is_aten_ && is_one_of(name_, kRowNorms)),
        fast_(find_fast_kernel(name_)) {
    if (op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key))
      stock_ = op.getComputedKernelForDispatchKey(key);
    const auto& arguments = op.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == "dtype" && is_aten_) dtype_argument_ = i;
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const Regions* regions = Regions::current();
    const Regions::Region* region = regions == nullptr ? nullptr : regions->find(device_);
    if (region == nullptr || region->policy == nullptr) {
      run_as_stock(op, keys, stack);
      return;
    }
    const CompiledPolicy& policy = *region->policy;
    const std::size_t count = op.schema().arguments().size();
    const std::span<c10::IValue> arguments(stack->data() + (stack->size() - count), count);
    if (is_script_cast_) {
      torch::jit::drop(*stack, count - 1);  // what remains is the tensor itself
      return;
    }

    if (!c10::GradMode::is_enabled()) custom_backward::see_operator_without_gradients();
    // fp32 that meets 16 bits in a product is lowered.
    const bool may_be_scores = is_bmm_ && (policy.casts() || policy.lowers_mixed()) &&
                               attention_scores::may_follow(arguments);
    run(op, keys, stack, arguments, *regions, policy);
    if (may_be_scores) attention_scores::remember(stack->back().toTensor());
  }

  bool has_row(const CompiledPolicy& policy) const {
    return policy.action(id_).has_value() || policy.keeps_operator(id_);
  }
  bool has_fast_kernel(const CompiledPolicy& policy) const { return policy.uses_fast_kernel(id_); }

 private:
  using Arguments = std::span<c10::IValue>;

  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
           Arguments arguments, const Regions& regions, const CompiledPolicy& policy) const {
    std::optional<CastAction> action = policy.action(id_);
    if (policy.keeps_operator(id_) && has_kept_argument(arguments, policy))
      action = CastAction::fp32;
    if (belongs_to_stock(action, arguments, policy)) {
      run_as_stock(op, keys, stack);
      return;
    }
    const Caster cast(regions, policy, name_);
    const FastKernel* const fast = policy.uses_fast_kernel(id_) ? fast_ : nullptr;
    switch (without_promotion(action.value_or(CastAction::leave), arguments, policy)) {
      case CastAction::lower: {
        if (multiplies_sparse(arguments)) {
          run_in_fp32(op, keys, stack, arguments, cast, fast);
          return;
        }
        const auto dtype = policy.dtype();
        const bool emulated = product_.has_value() && goes_through_fp32(arguments, policy, dtype);
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

  void run_as_stock(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    if (stock_.has_value()) {
      stock_->callBoxed(op, keys, stack);
    } else {
      op.redispatchBoxed(keys & below(key_), stack);
    }
  }

  void run_lowered(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                   Arguments arguments, const Caster& cast, c10::ScalarType dtype, bool emulated,
                   const FastKernel* fast = nullptr) const {
    const Conversion conversion = conversion_to(dtype, emulated);
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    replace_tensors(arguments,
                    [&](const at::Tensor& tensor) { return cast.convert(tensor, conversion); });
    if (!runs_fast(fast, arguments, stack)) run_without_casts(op, keys, stack);
    if (emulated) round_results(op, dtype, stack);
  }

  void run_in_fp32(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                   Arguments arguments, const Caster& cast, const FastKernel* fast) const {
    if (fast != nullptr && fast->widens && runs_fast(fast, arguments, stack, /*widen=*/true))
      return;
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    if (dtype_argument_.has_value()) {
      c10::IValue& dtype = arguments[*dtype_argument_];
      const c10::IValue& first = arguments[0];
      if (dtype.isNone() && first.isTensor() && is_eligible(first.toTensor(), device_)) {
        cast.converts_to_fp32(first.toTensor());
        dtype = static_cast<std::int64_t>(at::kFloat);
      }
    } else {
      replace_tensors(arguments, [&](const at::Tensor& tensor) { return cast.to_fp32(tensor); });
    }
    if (runs_fast(fast, arguments, stack)) return;
    run_without_casts(op, keys, stack);
  }

  bool multiplies_sparse(Arguments arguments) const {
    return product_.has_value() && device_ == c10::DeviceType::CPU && has_sparse(arguments);
  }

  // This operator is not cast, but those inside it may be.
  void run_uncast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                  Arguments arguments, const Caster& cast, const CompiledPolicy& policy,
                  const FastKernel* fast) const {
    if ((is_recurrent_ || is_row_norm_) && policy.lowers_mixed()) lower_mixed(arguments, cast);
    if (policy.lowers_mixed() && (lacks_16bit_ || multiplies_sparse(arguments))) {
      run_in_fp32(op, keys, stack, arguments, cast, fast);
      return;
    }
    std::optional<c10::ScalarType> mixed;
    if (product_.has_value() && (!product_->is_composite || product_->has_steps)) {
      const Dtypes dtypes(arguments, device_);
      const auto dtype = dtypes.common_16bit();
      // The policy's dtype differs, so the parts of a composite operator are cast one by one.
      const bool is_whole = !product_->is_composite || dtype == policy.dtype();
      if (dtype.has_value() && is_whole && goes_through_fp32(arguments, policy, *dtype)) {
        run_lowered(op, keys, stack, arguments, cast, *dtype, /*emulated=*/true);
        return;
      }
      if (policy.lowers_mixed() && !product_->is_composite) mixed = dtypes.mixed_16bit();
    }
    if (widens_mixed_ && policy.lowers_mixed() &&
        Dtypes(arguments, device_).mixed_16bit().has_value()) {
      run_in_fp32(op, keys, stack, arguments, cast, fast);
      return;
    }
    if (runs_fast(fast, arguments, stack)) return;
    if (mixed.has_value()) {
      // A result of a kept parameter, on its way through the other weights.
      const bool emulated = goes_through_fp32(arguments, policy, *mixed);
      run_lowered(op, keys, stack, arguments, cast, *mixed, emulated);
      return;
    }
    op.redispatchBoxed(keys & below(key_), stack);
  }

  // An fp32 argument that meets 16-bit weights is cast to their dtype.
  void lower_mixed(Arguments arguments, const Caster& cast) const {
    const c10::IValue& first = arguments[0];
    if (is_row_norm_ && !(first.isTensor() && first.toTensor().scalar_type() == at::kFloat)) return;
    const auto mixed = Dtypes(arguments, device_).mixed_16bit();
    if (!mixed.has_value()) return;
    const Conversion conversion = conversion_to(*mixed, /*emulated=*/false);
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    replace_tensors(arguments,
                    [&](const at::Tensor& tensor) { return cast.convert(tensor, conversion); });
  }

  static bool are_plain(Arguments arguments) {
    bool plain = true;
    for_each_tensor(arguments, [&](const at::Tensor& tensor) {
      plain = plain && (!tensor.defined() || nn::is_plain(tensor));
    });
    return plain;
  }

  // Replaces the arguments by the operator's result, if the kernel supports them.
  static bool runs_fast(const FastKernel* fast, Arguments arguments, Stack* stack,
                        bool widen = false) {
    if (fast == nullptr || !are_plain(arguments)) return false;
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    auto result = fast->run(arguments);
    if (!result.has_value()) return false;
    if (fast->widens && !widen) result = result->to(arguments[0].toTensor().scalar_type());
    torch::jit::drop(*stack, arguments.size());
    stack->emplace_back(std::move(*result));
    return true;
  }

  // With every Autocast key excluded by the caller.
  void run_without_casts(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         Stack* stack) const {
    op.redispatchBoxed((keys & below(key_)) - c10::autocast_dispatch_keyset, stack);
  }

  // Whether LibTorch's own kernel must run, or that of the operator's library.
  bool belongs_to_stock(std::optional<CastAction> action, Arguments arguments,
                        const CompiledPolicy& policy) const {
    if (!stock_.has_value()) return false;
    if (!action.has_value()) return policy.casts() && (policy.as_libtorch() || !is_aten_);
    if (*action == CastAction::lower) return name_ == kCudnnRnn;
    if (!policy.as_libtorch()) return false;
    if (*action == CastAction::promote) {
      const Dtypes dtypes(arguments, device_);
      return policy.dtype() == at::kHalf ? dtypes.bf16 : dtypes.fp16;
    }
    return *action == CastAction::ban;
  }

  // The dtype that promote and widest choose for these arguments.
  CastAction without_promotion(CastAction action, Arguments arguments,
                               const CompiledPolicy& policy) const {
    if (action != CastAction::promote && action != CastAction::widest) return action;
    Dtypes dtypes(arguments, device_);
    if (action == CastAction::promote)
      (policy.dtype() == at::kHalf ? dtypes.fp16 : dtypes.bf16) = true;
    const auto widest = dtypes.widest();
    if (widest == policy.dtype()) return CastAction::lower;
    return widest == at::kFloat ? CastAction::fp32 : CastAction::leave;
  }

  static bool has_kept_argument(Arguments arguments, const CompiledPolicy& policy) {
    bool found = false;
    for_each_tensor(arguments, [&](const at::Tensor& tensor) {
      found = found || (tensor.defined() && policy.keeps_fp32(tensor));
    });
    return found;
  }

  bool goes_through_fp32(Arguments arguments, const CompiledPolicy& policy,
                         c10::ScalarType dtype) const {
    if (!runs_natively(*product_, arguments, policy.native(dtype))) return true;
    if (product_->has_steps) return policy.repairs() && has_small_steps(arguments);
    // Every convolution operator takes (input, weight, …).
    return product_->is_convolution() && policy.repairs() && arguments[1].isTensor() &&
           convolves_wrongly(arguments[1].toTensor(), dtype);
  }

  static void round_results(const c10::OperatorHandle& op, c10::ScalarType dtype, Stack* stack) {
    const std::size_t count = op.schema().returns().size();
    replace_tensors({stack->data() + (stack->size() - count), count},
                    [&](const at::Tensor& tensor) {
                      return tensor.scalar_type() == at::kFloat ? tensor.to(dtype) : tensor;
                    });
  }

  void refuse_16bit(const c10::OperatorHandle& op, Arguments arguments,
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

  OpId id_;
  c10::DeviceType device_;
  c10::DispatchKey key_;
  std::string name_;
  bool is_aten_;
  bool is_script_cast_;
  bool is_bmm_;
  std::optional<MatrixProduct> product_;
  bool widens_mixed_;
  bool lacks_16bit_;
  bool is_recurrent_;
  bool is_row_norm_;
  const FastKernel* fast_;  // null: none
  std::optional<std::size_t> dtype_argument_;
  std::optional<c10::SafeKernelFunction> stock_;
};

// Kernels of operators that are called too often for boxing, and that have work in every region.
// The boxed kernel applies the policies.
class WatchingKernel : public c10::OperatorKernel {
 public:
  WatchingKernel(const c10::OperatorHandle& op, OpId id, c10::DeviceType device,
                 c10::DispatchKey key)
      : op_(op), boxed_(op, id, device, key), device_(device), key_(key) {}

 protected:
  struct InForce {
    const Regions* regions;
    const CompiledPolicy* policy;  // null: no region of ours, or one that is off
  };
  InForce in_force() const {
    const Regions* regions = Regions::current();
    const Regions::Region* region = regions == nullptr ? nullptr : regions->find(device_);
    return {regions, region == nullptr ? nullptr : region->policy.get()};
  }

  template <typename... Arguments>
  at::Tensor run_boxed(c10::DispatchKeySet keys, const Arguments&... arguments) const {
    Stack stack;
    torch::jit::push(stack, arguments...);
    boxed_(op_, keys, &stack);
    return std::move(stack.back()).toTensor();
  }

  c10::OperatorHandle op_;
  Kernel boxed_;
  c10::DeviceType device_;
  c10::DispatchKey key_;
};

class ViewKernel final : public WatchingKernel {
 public:
  using WatchingKernel::WatchingKernel;

  at::Tensor operator()(c10::DispatchKeySet keys, const at::Tensor& self,
                        c10::SymIntArrayRef sizes) const {
    const auto [regions, policy] = in_force();
    if (policy != nullptr) {
      if (attention_scores::are_viewed(self, sizes)) {
        const Caster cast(*regions, *policy, "view");
        const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
        return cast.to_fp32(self).view_symint(sizes);
      }
      const bool may_be_fast =
          boxed_.has_fast_kernel(*policy) && self.dim() == 4 && !self.is_contiguous();
      if (may_be_fast || boxed_.has_row(*policy)) return run_boxed(keys, self, sizes);
    }
    return at::_ops::view::redispatch(keys & below(key_), self, sizes);
  }
};

// add_ and sub_: torch::optim::SGD and hand-written optimizers use them to write to weights through
// tensor.data(), without a change of the version counter.
template <typename Operator>
class WritingKernel final : public WatchingKernel {
 public:
  using WatchingKernel::WatchingKernel;

  at::Tensor& operator()(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& other,
                         const at::Scalar& alpha) const {
    const auto [regions, policy] = in_force();
    if (policy != nullptr) {
      if (!self.requires_grad()) regions->cache->erase_memory_of(self);
      if (boxed_.has_row(*policy) || boxed_.has_fast_kernel(*policy)) {
        run_boxed(keys, self, other, alpha);
        return self;
      }
    }
    return Operator::redispatch(keys & below(key_), self, other, alpha);
  }
};

template <typename Functor>
c10::KernelFunction unboxed(const c10::OperatorHandle& op, OpId id, c10::DeviceType device,
                            c10::DispatchKey key) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Functor>(
      std::make_unique<Functor>(op, id, device, key));
}

constexpr std::array<std::string_view, 3> kWatched{"view", "add_.Tensor", "sub_.Tensor"};

c10::KernelFunction make_kernel(const c10::OperatorHandle& op, OpId id, c10::DeviceType device,
                                c10::DispatchKey key) {
  const std::string name = display_name(op.operator_name());
  if (name == "view") return unboxed<ViewKernel>(op, id, device, key);
  if (name == "add_.Tensor")
    return unboxed<WritingKernel<at::_ops::add__Tensor>>(op, id, device, key);
  if (name == "sub_.Tensor")
    return unboxed<WritingKernel<at::_ops::sub__Tensor>>(op, id, device, key);
  return c10::KernelFunction::makeFromBoxedFunctor<Kernel>(
      std::make_unique<Kernel>(op, id, device, key));
}

// LibTorch warns, once per process, that a kernel is overridden, which is intended here.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::vector<std::string> aten_operators_with_kernel(c10::DispatchKey key) {
  std::vector<std::string> names;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(key)) {
    if (is_aten(name) && dispatcher.findSchema(name).has_value())
      names.push_back(display_name(name));
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<c10::OperatorHandle> operators_of_16bit_models() {
  std::vector<c10::OperatorHandle> operators;
  const auto add = [&](std::string_view name) {
    const auto found = aten_operators().find(std::string(name));
    if (found == aten_operators().end()) return;  // not in this version of LibTorch
    std::copy_if(found->second.begin(), found->second.end(), std::back_inserter(operators),
                 [](const c10::OperatorHandle& op) { return !writes_to_argument(op); });
  };
  for (const std::string_view name : kWidensMixed) add(name);
  for (const std::string_view name : kLack16Bits) add(name);
  for (const std::string_view name : presets::without_16bit_kernels()) add(name);
  return operators;
}

class Registry {
 public:
  // Never destroyed: kernels may be called while the process ends.
  static Registry& instance() {
    static auto* const registry = new Registry;
    return *registry;
  }

  OpId id(const c10::OperatorHandle& op) {
    const std::lock_guard lock(mutex_);
    return id_locked(op);
  }

  const std::vector<std::string>& stock(c10::DeviceType device) {
    const std::lock_guard lock(mutex_);
    return stock_locked(device);
  }

  void install_stock(c10::DeviceType device) {
    const std::lock_guard lock(mutex_);
    if (!stock_installed_.insert(device).second) return;
    for (const std::string& name : stock_locked(device)) {
      if (const auto op = find_operator(name)) install_locked(*op, device);
    }
    for (const std::string_view name : kScriptCasts) {
      if (const auto op = find_operator(name)) install_locked(*op, device);
    }
    for (const std::string_view name : kWatched) {
      if (const auto op = find_operator(name)) install_locked(*op, device);
    }
  }

  void install(const c10::OperatorHandle& op, c10::DeviceType device) {
    const std::lock_guard lock(mutex_);
    stock_locked(device);  // before the first kernel of Semitone replaces one
    install_locked(op, device);
  }

 private:
  OpId id_locked(const c10::OperatorHandle& op) {
    return ids_.emplace(op.operator_name(), static_cast<OpId>(ids_.size())).first->second;
  }

  const std::vector<std::string>& stock_locked(c10::DeviceType device) {
    const auto found = stock_.find(device);
    if (found != stock_.end()) return found->second;
    const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
    return stock_.emplace(device, aten_operators_with_kernel(key)).first->second;
  }

  void install_locked(const c10::OperatorHandle& op, c10::DeviceType device) {
    const OpId id = id_locked(op);
    if (installed_.count({id, device}) > 0) return;
    const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
    Silence silence;
    const c10::WarningUtils::WarningHandlerGuard guard(&silence);
    installed_.emplace(std::pair(id, device),
                       c10::Dispatcher::singleton().registerImpl(
                           op.operator_name(), key, make_kernel(op, id, device, key), std::nullopt,
                           nullptr, "semitone autocast"));
  }

  std::mutex mutex_;
  std::unordered_map<c10::OperatorName, OpId> ids_;
  std::map<c10::DeviceType, std::vector<std::string>> stock_;
  std::set<c10::DeviceType> stock_installed_;
  std::map<std::pair<OpId, c10::DeviceType>, c10::RegistrationHandleRAII> installed_;
};

}  // namespace

OpId op_id(const c10::OperatorHandle& op) {
  return Registry::instance().id(op);
}

void install_stock_kernels(c10::DeviceType device) {
  Registry::instance().install_stock(device);
}

void install_kernel(const c10::OperatorHandle& op, c10::DeviceType device) {
  Registry::instance().install(op, device);
}

void install_mixed_kernels(c10::DeviceType device) {
  for (const auto& op : matrix_products()) install_kernel(op, device);
  for (const auto& op : operators_of_16bit_models()) install_kernel(op, device);
}

const std::vector<std::string>& stock_operators(c10::DeviceType device) {
  return Registry::instance().stock(device);
}

}  // namespace semitone::amp
