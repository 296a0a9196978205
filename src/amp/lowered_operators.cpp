#include "src/amp/lowered_operators.h"

#include "semitone/core/dtype.h"
#include "src/autocast/model_entries.h"
#include "src/autocast/op_names.h"
#include "src/core/operator_inputs.h"
#include "src/core/replica_parameters.h"

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace semitone::amp {
namespace {

// "layer2.conv" for "layer2.conv.weight"; a parameter of the model itself has the layer "".
std::string layer_of(const std::string& parameter) {
  const auto dot = parameter.rfind('.');
  return dot == std::string::npos ? std::string() : parameter.substr(0, dot);
}

// A pattern that matches only this name.
std::string pattern_of(const std::string& name) {
  std::string pattern;
  for (const char letter : name) {
    if (std::string_view("*?[\\").find(letter) != std::string_view::npos) pattern += '\\';
    pattern += letter;
  }
  return pattern;
}

// Operators that copy or fill: keeping them in fp32 changes no arithmetic.
constexpr std::array<std::string_view, 7> kCopies{
    "_to_copy", "clone", "contiguous", "empty_like", "zeros_like", "ones_like", "full_like"};

// Whether an operator returns new memory. Views share an argument's, or may.
bool makes_memory(const c10::FunctionSchema& schema) {
  return std::none_of(schema.returns().begin(), schema.returns().end(),
                      [](const c10::Argument& result) { return result.alias_info() != nullptr; });
}

// Collects the lowered operators of a thread.
class OperatorLog {
 public:
  OperatorLog(const Model& model, const CastPolicy& policy)
      : policy_(policy), parameters_(entries_of(model)) {
    std::erase_if(parameters_, [](const ModelEntry& entry) { return !entry.is_parameter; });
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      by_tensor_.emplace(parameters_[i].tensor.unsafeGetTensorImpl(), i);
  }

  void add(const at::RecordFunction& record) {
    const auto name = record.operator_name();
    // Autocast's kernels exclude the key for what they call.
    if (!name.has_value() || torch::autograd::get_current_node() != nullptr || is_outside()) return;
    Seen* const seen = find(*name);
    if (seen == nullptr) return;
    Arguments arguments;
    // A boxed call has the whole stack.
    const auto inputs = inputs_of(record);
    for (const c10::IValue& value :
         inputs.slice(inputs.size() - std::min(inputs.size(), seen->arguments)))
      look_at(value, arguments);
    if (!seen->is_lowered_by_policy && !(seen->follows_arguments && arguments.has_16_bits)) return;
    if (!seen->place.has_value()) {
      seen->place = operators_.size();
      operators_.push_back({seen->name});
    }
    for (const std::size_t i : arguments.parameters) {
      const std::string& parameter = parameters_[i].name;
      operators_[*seen->place].layers[layer_of(parameter)].insert(pattern_of(parameter));
    }
  }

  std::vector<LoweredOperator> take() { return std::move(operators_); }

 private:
  struct Seen {
    std::string name;
    bool is_candidate = false;
    bool is_lowered_by_policy = false;
    std::size_t arguments = 0;
    bool follows_arguments = false;  // a 16-bit argument alone stays in 16 bits
    std::optional<std::size_t> place{};
  };

  bool is_outside() const {
    const c10::DispatchKey key =
        at::autocast::get_autocast_dispatch_key_from_device_type(policy_.device());
    return c10::impl::tls_is_dispatch_key_excluded(key) ||
           !at::autocast::is_autocast_enabled(policy_.device());
  }

  // Null: no candidate.
  Seen* find(const c10::OperatorName& op) {
    const auto [place, is_new] = seen_.try_emplace(op);
    Seen& seen = place->second;
    if (is_new) seen = examine(op);
    return seen.is_candidate ? &seen : nullptr;
  }

  Seen examine(const c10::OperatorName& op) const {
    Seen seen{display_name(op)};
    const auto handle = c10::Dispatcher::singleton().findSchema(op);
    if (!handle.has_value() || writes_to_argument(*handle) || !makes_memory(handle->schema()) ||
        std::find(kCopies.begin(), kCopies.end(), seen.name) != kCopies.end())
      return seen;
    seen.arguments = handle->schema().arguments().size();
    const auto row = policy_.find(seen.name);
    seen.is_lowered_by_policy = row.has_value() && row->action == CastAction::lower;
    seen.follows_arguments = !row.has_value() || row->action == CastAction::promote ||
                             row->action == CastAction::leave || row->action == CastAction::widest;
    seen.is_candidate = seen.is_lowered_by_policy || seen.follows_arguments;
    return seen;
  }

  // Of one call.
  struct Arguments {
    bool has_16_bits = false;
    std::vector<std::size_t> parameters;
  };

  void look_at(const c10::IValue& value, Arguments& arguments) const {
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) look_at(tensor, arguments);
    } else if (value.isTensor()) {
      look_at(value.toTensor(), arguments);
    }
  }

  void look_at(const at::Tensor& tensor, Arguments& arguments) const {
    if (!tensor.defined()) return;
    arguments.has_16_bits |= is_16bit(tensor.scalar_type());
    auto found = by_tensor_.find(original_of(tensor));
    // Linear layers multiply by a view: weight.t().
    if (found == by_tensor_.end() && tensor.is_view())
      found = by_tensor_.find(original_of(at::Tensor(tensor._base())));
    if (found != by_tensor_.end()) arguments.parameters.push_back(found->second);
  }

  const CastPolicy& policy_;
  std::vector<ModelEntry> parameters_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_tensor_;
  std::unordered_map<c10::OperatorName, Seen> seen_;
  std::vector<LoweredOperator> operators_;
};

thread_local OperatorLog* operator_log = nullptr;

std::unique_ptr<at::ObserverContext> note_operator(const at::RecordFunction& record) {
  if (operator_log != nullptr) operator_log->add(record);
  return nullptr;
}

}  // namespace

std::vector<LoweredOperator> lowered_operators(const Model& model, const CastPolicy& policy,
                                               const std::function<void()>& function) {
  OperatorLog log(model, policy);
  OperatorLog* const outer = std::exchange(operator_log, &log);
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(note_operator)
                                                     .needsInputs(true)
                                                     .scopes({at::RecordScope::FUNCTION}));
  const auto remove = c10::make_scope_exit([&] {
    at::removeCallback(handle);
    operator_log = outer;
  });
  function();
  return log.take();
}

}  // namespace semitone::amp
