#include "tests/support/accelerator/machine.h"
#include "tests/support/accelerator/on_host.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// The kernel of every operator that has none of its own for the device: the CPU's, over the shadow
// of the device's memory.
namespace semitone::test::accelerator {
namespace {

// On a real device the host waits for their results, whose shapes or values it needs.
constexpr std::array<std::string_view, 8> kReadByHost = {
    "aten::equal",   "aten::nonzero",    "aten::masked_select", "aten::_unique2",
    "aten::_unique", "aten::unique_dim", "aten::bincount",      "aten::repeat_interleave"};

// They take indices and sizes from the CPU's memory too.
constexpr std::array<std::string_view, 5> kTakeHostTensors = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_copy"};

template <std::size_t N>
bool is_one_of(const std::array<std::string_view, N>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// They write to their running statistics, which their schemas do not say.
bool writes_unmarked(const std::string& op, const c10::Argument& argument) {
  return op == "aten::native_batch_norm" &&
         (argument.name() == "running_mean" || argument.name() == "running_var");
}

bool is_view(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return !returns.empty() && returns[0].alias_info() != nullptr &&
         !returns[0].alias_info()->isWrite();
}

// LibTorch's operators for other devices lead convolutions to these.
std::optional<c10::OperatorHandle> convolution_of(const std::string& name) {
  auto& dispatcher = c10::Dispatcher::singleton();
  if (name == "aten::convolution_overrideable")
    return dispatcher.findSchemaOrThrow("aten::convolution", "");
  if (name == "aten::convolution_backward_overrideable")
    return dispatcher.findSchemaOrThrow("aten::convolution_backward", "");
  return std::nullopt;
}

struct Silence : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), name_(op.operator_name().name), stack_(stack) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    auto given = torch::jit::last(stack_, arguments.size());
    for (std::size_t i = 0; i < arguments.size(); ++i) look_at(given[i], arguments[i]);
    const c10::OptionalDeviceGuard on_device(device_);
    if (device_.has_value() && !is_view(op_.schema())) launch();
    std::vector<c10::IValue> replaced;
    for (const c10::IValue& value : given) replaced.push_back(on_host_.replace(value));
    std::move(replaced.begin(), replaced.end(), stack_.end() - std::ssize(replaced));
    compute();
    on_host_.write_back();
    const std::size_t results = op_.schema().returns().size();
    for (auto result = stack_.end() - static_cast<std::ptrdiff_t>(results); result != stack_.end();
         ++result) {
      *result = on_host_.replace_result(
          *result, device_.value_or(c10::kCPU), [this](const at::Tensor& made) {
            if (moment_.has_value()) Machine::instance().access({{made, true}}, *moment_, name_);
          });
    }
  }

 private:
  void look_at(const c10::IValue& value, const c10::Argument& argument) {
    const bool is_written =
        (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) ||
        writes_unmarked(name_, argument);
    for_each_tensor(value, [&](const at::Tensor& tensor) { look_at(tensor, is_written); });
    if (value.isDevice() && value.toDevice().type() == kType) set_device(value.toDevice());
  }

  void look_at(const at::Tensor& tensor, bool is_written) {
    if (tensor.device().type() == kType) {
      set_device(tensor.device());
      tensors_.push_back({tensor, is_written});
    } else if (tensor.dim() > 0 && !is_one_of(kTakeHostTensors, name_)) {
      Machine::instance().fail(name_ + " computes on an accelerator with a tensor of the host");
    }
  }

  void set_device(c10::Device given) {
    if (!given.has_index()) given = device(current_device());
    if (device_.value_or(given) != given)
      Machine::instance().fail(
          c10::str(name_, " gets tensors on ", *device_, " and on ", given, " in one call"));
    device_ = given;
  }

  void launch() {
    Machine& machine = Machine::instance();
    const c10::Stream stream = current_stream(device_->index());
    moment_ = machine.timeline().launch(stream);
    machine.access(tensors_, *moment_, name_);
    const bool by_mask = is_one_of(kTakeHostTensors, name_) &&
                         std::any_of(tensors_.begin() + 1, tensors_.end(), [](const auto& use) {
                           return use.tensor.scalar_type() == at::kBool;
                         });
    if (!by_mask && !is_one_of(kReadByHost, name_)) return;
    ++machine.counts().reads;
    machine.host_waits(Clock(machine.timeline().past(stream)));
  }

  void compute() {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    // The CPU's kernels of losses warn that they use their output for values before the reduction.
    Silence silence;
    const c10::WarningUtils::WarningHandlerGuard no_warnings(&silence);
    if (const auto convolution = convolution_of(name_)) {
      // The gradient of convolution has one more argument, bias_sizes.
      if (convolution->schema().arguments().size() > op_.schema().arguments().size()) {
        const auto weight = torch::jit::peek(stack_, 2, op_.schema().arguments().size()).toTensor();
        const auto grad = torch::jit::peek(stack_, 0, op_.schema().arguments().size()).toTensor();
        stack_.insert(stack_.end() - 7, c10::IValue(std::vector<std::int64_t>{grad.size(1)}));
      }
      convolution->callBoxed(&stack_);
      return;
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
  }

  const c10::OperatorHandle& op_;
  std::string name_;
  torch::jit::Stack& stack_;
  std::optional<c10::Device> device_;
  std::optional<Moment> moment_;
  std::vector<Machine::Use> tensors_;
  OnHost on_host_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Lock lock(Machine::instance().mutex());
  Call(op, *stack).run();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* const name : {"convolution_overrideable", "convolution_backward_overrideable"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace semitone::test::accelerator
