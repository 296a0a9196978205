#include "src/report/operator_trace.h"

#include "src/core/operator_inputs.h"
#include "src/kernels/fp8.h"
#include "src/report/observation.h"
#include "src/report/operator_info.h"
#include "src/report/sample_state.h"
#include "src/report/tensor_values.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace semitone::report {
namespace {

constexpr std::string_view kEmulated = "emulated";  // events::OperatorReplaced::kernel

// Null for a tensor without memory of the usual kind.
const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return tensor.storage().unsafeGetStorageImpl();
}

// An operator, or a node of the graph, in progress on this thread. It keeps no tensor.
struct TracedCall : at::ObserverContext {
  std::shared_ptr<SampleState> state;
  TracedCall* caller = nullptr;
  const OperatorInfo* op = nullptr;  // null: a node
  Pass pass = Pass::other;
  std::string kernel = "native";
  // Of the floating-point arguments after casts; the second without the casts from 16 bits to fp32.
  // amp::Emulation makes those to compute in fp32 what would be computed in 16 bits.
  c10::SmallVector<c10::ScalarType, 4> dtypes;
  c10::SmallVector<c10::ScalarType, 4> emulated_dtypes;
  // Of the arguments, in the forward pass. Not to be read: the memory may be gone.
  c10::SmallVector<const c10::StorageImpl*, 8> memory;
  OperatorCost cost;
  // The parameter among its arguments, if its result may be a layer's output.
  const RecordedModel::Entry* parameter = nullptr;
  bool has_parameter = false;  // it, or one that called it
  double began = 0;            // on the thread's clock
  double inside = 0;           // seconds of those that it called
  int exceptions = 0;          // in flight when it began
};

TracedCall*& innermost() {
  static thread_local TracedCall* call = nullptr;
  return call;
}

// The bytes that an operator reads or writes. An expanded tensor has more elements than memory.
std::int64_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.layout() != at::kStrided || tensor.is_nested()) return 0;
  return static_cast<std::int64_t>(std::min(tensor.nbytes(), tensor.storage().nbytes()));
}

// Makes a view, or memory that nothing has been written to.
bool moves_no_data(const OperatorInfo& op) {
  return op.results.empty() && op.written.empty();
}

// Whether an argument is something that a layer computes with its parameter. What a pointwise operator
// broadcasts to the parameter, such as the start of a penalty (w - w0).pow(2), is not.
bool has_input(const RecordedModel& model, const OperatorInfo& op,
               c10::ArrayRef<c10::IValue> inputs, const at::Tensor& parameter) {
  bool found = false;
  const auto look_at = [&](const at::Tensor& tensor, std::int64_t) {
    if (found || !tensor.defined() || model.find(tensor) != nullptr) return;
    const bool is_broadcast = op.is_pointwise && !tensor.is_nested() &&
                              at::is_expandable_to(tensor.sizes(), parameter.sizes());
    found = !is_broadcast;
  };
  for (const c10::IValue& input : inputs) for_tensors(input, look_at);
  return found;
}

// Shows a batch norm that is trained. Its arguments are input, weight, bias, running_mean,
// running_var, training, …
void look_at_batch_norm(const TracedCall& call, c10::ArrayRef<c10::IValue> inputs) {
  constexpr std::size_t kWeight = 1;
  constexpr std::size_t kRunningMean = 3;
  constexpr std::size_t kTraining = 5;
  if (call.op->name != "batch_norm" || inputs.size() <= kTraining || !inputs[kTraining].isBool())
    return;
  if (call.pass != Pass::forward || !at::GradMode::is_enabled()) return;  // an evaluation
  BatchNormUse use;
  use.training = inputs[kTraining].toBool();
  const RecordedModel::Entry* entry = nullptr;
  if (inputs[kRunningMean].isTensor() && inputs[kRunningMean].toTensor().defined()) {
    const at::Tensor& mean = inputs[kRunningMean].toTensor();
    use.dtype = mean.scalar_type();
    entry = call.state->model().find(mean);
  }
  if (entry == nullptr && inputs[kWeight].isTensor() && inputs[kWeight].toTensor().defined())
    entry = call.state->model().find(inputs[kWeight].toTensor());
  if (entry != nullptr) call.state->add_batch_norm(entry->layer, use);
}

void enter_operator(TracedCall& call, const at::RecordFunction& record) {
  const RecordedModel& model = call.state->model();
  const auto inputs = last(inputs_of(record), call.op->arguments.size());
  c10::SmallVector<c10::ScalarType, 4> scalars;
  bool writes_parameter = false;
  const RecordedModel::Entry* parameter = nullptr;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    for_tensors(inputs[i], [&](const at::Tensor& tensor, std::int64_t) {
      if (!tensor.defined()) return;
      if (call.pass == Pass::forward) call.memory.push_back(storage_of(tensor));
      if (!moves_no_data(*call.op)) call.cost.bytes += bytes_of(tensor);
      if (tensor.is_floating_point() && !tensor.unsafeGetTensorImpl()->is_wrapped_number())
        (tensor.dim() == 0 ? scalars : call.dtypes).push_back(tensor.scalar_type());
      const auto* const entry = model.find(tensor);
      if (entry == nullptr || !entry->is_parameter) return;
      if (parameter == nullptr) parameter = entry;
      if (call.op->writes(i)) writes_parameter = true;
    });
  }
  // As in LibTorch's promotion, tensors without dimensions count if there are no others.
  if (call.dtypes.empty()) call.dtypes = scalars;
  call.emulated_dtypes = call.dtypes;
  // An operator on parameters alone, such as a cast or a penalty, is no layer.
  const bool is_layer = parameter != nullptr && !writes_parameter && call.pass == Pass::forward &&
                        !call.op->results.empty() &&
                        has_input(model, *call.op, inputs, parameter->tensor);
  const bool is_inside = call.caller != nullptr && call.caller->has_parameter;
  if (is_layer && !is_inside) call.parameter = parameter;
  call.has_parameter = is_layer || is_inside;
  look_at_batch_norm(call, inputs);
}

std::unique_ptr<at::ObserverContext> start_call(const at::RecordFunction& record) {
  std::shared_ptr<SampleState> state = SampleState::looking();
  if (state == nullptr) return nullptr;
  std::unique_ptr<TracedCall> call;
  const Observation observation(state->observed());
  try {
    const bool is_node = record.scope() == at::RecordScope::BACKWARD_FUNCTION;
    const OperatorInfo* const op = is_node ? nullptr : operator_of(record);
    if (!is_node && op == nullptr) return nullptr;
    const QuietScope quiet;
    call = std::make_unique<TracedCall>();
    call->state = state;
    call->caller = innermost();
    call->op = op;
    call->exceptions = std::uncaught_exceptions();
    if (is_node) {
      state->begin_node(observation.step_time());
    } else {
      call->pass = state->begin_operator(observation.step_time());
      enter_operator(*call, record);
    }
    call->began = observation.thread_time();
  } catch (const std::exception& error) {
    state->fail(record.name() + std::string(": ") + error.what());
    return nullptr;
  }
  innermost() = call.get();
  return call;
}

// The dtype that an operator computes in. An operator with arguments in fp8 multiplies them so, and adds
// others, which c10::promoteTypes refuses to combine.
c10::ScalarType promoted(c10::ScalarType one, c10::ScalarType other) {
  if (one == c10::ScalarType::Undefined || kernels::is_fp8(other)) return other;
  return kernels::is_fp8(one) ? one : c10::promoteTypes(one, other);
}

c10::ScalarType widest(const TracedCall& call) {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  for (const c10::ScalarType other : call.kernel == kEmulated ? call.emulated_dtypes : call.dtypes)
    dtype = promoted(dtype, other);
  return dtype;
}

// Shows the memory that the operator made: none of a view, and none of what changes an argument.
void look_at_memory(const TracedCall& call, c10::ArrayRef<c10::IValue> outputs) {
  for (const c10::IValue& output : outputs) {
    for_tensors(output, [&](const at::Tensor& tensor, std::int64_t) {
      const auto* const storage = storage_of(tensor);
      const bool is_new =
          std::find(call.memory.begin(), call.memory.end(), storage) == call.memory.end();
      if (storage != nullptr && is_new) call.state->add_memory(tensor.storage());
    });
  }
}

void leave_operator(TracedCall& call, const at::RecordFunction& record) {
  // After an exception there are no results.
  if (std::uncaught_exceptions() == call.exceptions) {
    const auto outputs = last(record.outputs(), call.op->returns);
    for (const std::size_t i : call.op->results) {
      if (i >= outputs.size()) continue;
      for_tensors(outputs[i], [&](const at::Tensor& tensor, std::int64_t) {
        if (!tensor.defined()) return;
        call.cost.bytes += bytes_of(tensor);
        if (call.parameter == nullptr) return;
        const auto* const parameter = std::exchange(call.parameter, nullptr);
        call.state->add_output({parameter, call.op}, tensor);
      });
    }
    if (call.pass == Pass::forward) look_at_memory(call, outputs);
  }
  call.state->add_operator({call.op->name, call.pass, widest(call), call.kernel}, call.cost);
}

void end_call(const at::RecordFunction& record, at::ObserverContext* context) {
  auto* const call = static_cast<TracedCall*>(context);
  if (call == nullptr) return;
  SampleState& state = *call->state;
  const Observation observation(state.observed());
  innermost() = call->caller;
  const double seconds = observation.thread_time() - call->began;
  if (call->caller != nullptr) call->caller->inside += seconds;
  if (!state.is_looking()) return;
  try {
    const QuietScope quiet;
    call->cost.calls = 1;
    call->cost.seconds = std::max(0.0, seconds - call->inside);
    if (call->op != nullptr) {
      leave_operator(*call, record);
    } else {
      state.end_node(observation.step_time());
    }
  } catch (const std::exception& error) {
    state.fail(record.name() + std::string(": ") + error.what());
  }
}

// The innermost operator of a name in progress on this thread, or null.
TracedCall* find_call(const SampleState& state, std::string_view op) {
  TracedCall* call = innermost();
  while (call != nullptr &&
         (call->op == nullptr || call->op->name != op || call->state.get() != &state))
    call = call->caller;
  return call;
}

template <typename Dtypes>
void replace(Dtypes& dtypes, const events::Cast& event) {
  auto* const cast = std::find(dtypes.begin(), dtypes.end(), event.from);
  if (cast != dtypes.end()) *cast = event.to;
}

OperatorCost cost_of(const events::Cast& event) {
  OperatorCost cost;
  cost.casts = 1;
  cost.cached_casts = event.cached ? 1 : 0;
  const std::size_t bytes = c10::elementSize(event.from) + c10::elementSize(event.to);
  cost.cast_bytes = event.cached ? 0 : event.numel * static_cast<std::int64_t>(bytes);
  return cost;
}

}  // namespace

OperatorTrace::OperatorTrace() : OperatorCallbacks(&start_call, &end_call) {}

void OperatorTrace::add(SampleState& state, const events::Cast& event) {
  if (SampleState::looking().get() != &state) return;
  TracedCall* const call = find_call(state, event.op);
  if (call == nullptr) {  // a function that is no operator
    const Observation observation(state.observed());
    const Pass pass = state.begin_operator(observation.step_time());
    return state.add_operator({event.op, pass, event.to}, cost_of(event));
  }
  call->cost += cost_of(event);
  replace(call->dtypes, event);
  if (event.to != at::kFloat) replace(call->emulated_dtypes, event);
}

void OperatorTrace::add(SampleState& state, const events::OperatorReplaced& event) {
  if (TracedCall* const call = find_call(state, event.op)) call->kernel = event.kernel;
}

}  // namespace semitone::report
