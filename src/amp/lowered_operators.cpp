#include "src/amp/lowered_operators.h"

#include "semitone/core/dtype.h"
#include "src/autocast/model_entries.h"
#include "src/autocast/op_names.h"

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

// The parameters of a layer: "head.weight" gives "head.*", a parameter of the model itself its name.
std::string glob_of(const std::string& parameter) {
  const auto dot = parameter.rfind('.');
  return dot == std::string::npos ? parameter : parameter.substr(0, dot + 1) + "*";
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
  OperatorLog(const Model& model, const CastPolicy& policy) : policy_(policy) {
    for (const ModelEntry& entry : entries_of(model)) {
      if (entry.is_parameter)
        layers_.emplace(entry.tensor.unsafeGetTensorImpl(), glob_of(entry.name));
    }
  }

  void add(const at::RecordFunction& record) {
    const auto name = record.operator_name();
    // Autocast's kernels exclude the key for what they call.
    if (!name.has_value() || torch::autograd::get_current_node() != nullptr || is_outside()) return;
    Seen* const seen = find(*name);
    if (seen == nullptr) return;
    bool is_lowered = seen->is_lowered_by_policy;
    std::vector<std::string> layers;
    for (const c10::IValue& value : record.inputs()) look_at(value, *seen, is_lowered, layers);
    if (!is_lowered) return;
    if (!seen->place.has_value()) {
      seen->place = operators_.size();
      operators_.push_back({seen->name, {}});
    }
    std::vector<std::string>& known = operators_[*seen->place].layers;
    for (std::string& layer : layers) {
      if (std::find(known.begin(), known.end(), layer) == known.end())
        known.push_back(std::move(layer));
    }
  }

  std::vector<LoweredOperator> take() { return std::move(operators_); }

 private:
  struct Seen {
    std::string name;
    bool is_candidate = false;
    bool is_lowered_by_policy = false;
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
    const auto row = policy_.find(seen.name);
    seen.is_lowered_by_policy = row.has_value() && row->action == CastAction::lower;
    seen.follows_arguments = !row.has_value() || row->action == CastAction::promote ||
                             row->action == CastAction::leave || row->action == CastAction::widest;
    seen.is_candidate = seen.is_lowered_by_policy || seen.follows_arguments;
    return seen;
  }

  void look_at(const c10::IValue& value, const Seen& seen, bool& is_lowered,
               std::vector<std::string>& layers) const {
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList())
        look_at(tensor, seen, is_lowered, layers);
    } else if (value.isTensor()) {
      look_at(value.toTensor(), seen, is_lowered, layers);
    }
  }

  void look_at(const at::Tensor& tensor, const Seen& seen, bool& is_lowered,
               std::vector<std::string>& layers) const {
    if (!tensor.defined()) return;
    if (seen.follows_arguments && is_16bit(tensor.scalar_type())) is_lowered = true;
    const auto layer = layers_.find(tensor.unsafeGetTensorImpl());
    if (layer != layers_.end()) layers.push_back(layer->second);
  }

  const CastPolicy& policy_;
  std::unordered_map<const c10::TensorImpl*, std::string> layers_;
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
