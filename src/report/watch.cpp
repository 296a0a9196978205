#include "src/report/watch.h"

#include "src/core/operator_inputs.h"
#include "src/report/examine.h"
#include "src/report/frame.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace semitone::report {
namespace {

void add_argument(Frame& frame, const c10::IValue& value, std::size_t position) {
  frame.numbers |= kinds_of_number(value);
  const bool is_written = frame.op->writes(position);
  const bool is_overwritten = is_written && frame.op->overwrites(position);
  for_tensors(value, [&](const at::Tensor& tensor, std::int64_t index) {
    if (!tensor.defined()) return;
    const auto* const entry = frame.state->entry_of(tensor);
    if (entry != nullptr && frame.place.entry == nullptr) frame.place = {entry, false};
    if (!can_examine(tensor) && !is_written) return;
    WatchedArgument argument{tensor, position, index};
    argument.is_written = is_written;
    argument.is_overwritten = is_overwritten;
    if (is_written && !is_overwritten && can_examine(tensor)) argument.before = kinds_of(tensor);
    frame.arguments.push_back(std::move(argument));
  });
}

void find_place(Frame& frame, ThreadTrace& trace) {
  const bool is_forward = torch::autograd::get_current_node() == nullptr;
  if (frame.place.entry != nullptr) {
    if (is_forward) trace.last_layer = frame.place.entry;
  } else if (frame.caller != nullptr && frame.caller->place.entry != nullptr) {
    frame.place = frame.caller->place;
  } else if (is_forward && trace.last_layer != nullptr) {
    frame.place = {trace.last_layer, true};
  }
}

// An argument may be the memory of another one that is written to: mul_out(x, x, y), x.div_(x).
void look_at_shared_memory(Frame& frame) {
  for (const WatchedArgument& out : frame.arguments) {
    if (!frame.op->writes(out.position) || !out.tensor.has_storage()) continue;
    for (WatchedArgument& argument : frame.arguments) {
      if (argument.is_written || !argument.tensor.storage().is_alias_of(out.tensor.storage()))
        continue;
      argument.before = kinds_of(argument.tensor);
      argument.is_written = true;
    }
  }
}

void enter_operator(Frame& frame, const at::RecordFunction& record, ThreadTrace& trace) {
  const auto inputs = last(inputs_of(record), frame.op->arguments.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) add_argument(frame, inputs[i], i);
  look_at_shared_memory(frame);
  find_place(frame, trace);
  frame.is_ignored =
      (frame.caller != nullptr && frame.caller->is_ignored) || frame.state->ignores(*frame.op);
  if (record.seqNr() >= 0)
    frame.state->add_forward_op({record.threadId(), record.seqNr()}, {frame.op, frame.place});
}

void enter_node(Frame& frame, const at::RecordFunction& record) {
  frame.node = torch::autograd::get_current_node();
  frame.node_id = {record.forwardThreadId(), record.seqNr()};
  frame.is_custom_node = frame.node != nullptr && is_custom_function(*frame.node);
  // Not kept: accumulating a gradient takes its memory if nothing else refers to it.
  const auto inputs = inputs_of(record);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].isTensor() && can_examine(inputs[i].toTensor()))
      examine_gradient(frame, inputs[i].toTensor(), i);
  }
}

std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& record) {
  std::shared_ptr<CheckState> state = CheckState::looking();
  if (state == nullptr) return nullptr;
  ThreadTrace& trace = ThreadTrace::of_this_thread();
  std::unique_ptr<Frame> frame;
  try {
    const bool is_node = record.scope() == at::RecordScope::BACKWARD_FUNCTION;
    const OperatorInfo* const op = is_node ? nullptr : operator_of(record);
    if (!is_node && op == nullptr) return nullptr;
    const QuietScope quiet;
    frame = std::make_unique<Frame>(state);
    trace.enter(*state);
    frame->op = op;
    frame->exceptions = std::uncaught_exceptions();
    frame->caller = trace.innermost;
    if (is_node) {
      enter_node(*frame, record);
    } else {
      enter_operator(*frame, record, trace);
    }
  } catch (const std::exception& error) {
    state->failed(record.name() + std::string(": ") + error.what());
    return nullptr;
  }
  trace.innermost = frame.get();
  return frame;
}

bool is_argument(const Frame& frame, const at::Tensor& tensor) {
  return std::any_of(frame.arguments.begin(), frame.arguments.end(),
                     [&](const WatchedArgument& argument) {
                       return argument.tensor.has_storage() &&
                              argument.tensor.storage().is_alias_of(tensor.storage());
                     });
}

// Whether an operator that this one called has made a tensor, and had nothing to report.
bool is_cleared(const Frame& frame, const at::Tensor& tensor) {
  return !frame.is_suspicious && ThreadTrace::of_this_thread().was_examined(tensor);
}

// Whether a result may not have arrived: a copy from another device may go on for a while.
bool is_on_its_way(const Frame& frame, const at::Tensor& tensor) {
  return tensor.is_cpu() &&
         std::any_of(frame.arguments.begin(), frame.arguments.end(),
                     [](const WatchedArgument& argument) { return !argument.tensor.is_cpu(); });
}

void leave_operator(Frame& frame, const at::RecordFunction& record) {
  FirstNonFinite first;
  const auto outputs = last(record.outputs(), frame.op->returns);
  for (const std::size_t i : frame.op->results) {
    if (i >= outputs.size()) continue;
    for_tensors(outputs[i], [&](const at::Tensor& tensor, std::int64_t index) {
      if (!can_examine(tensor) || is_on_its_way(frame, tensor)) return;
      if (frame.op->is_composite && (is_argument(frame, tensor) || is_cleared(frame, tensor)))
        return;
      std::string name = "result";
      if (frame.op->returns > 1) name += " " + std::to_string(i);
      if (index >= 0) name += "[" + std::to_string(index) + "]";
      examine_result(frame, tensor, name, first);
    });
  }
  for (const WatchedArgument& argument : frame.arguments)
    if (frame.op->writes(argument.position) && can_examine(argument.tensor) &&
        !is_on_its_way(frame, argument.tensor))
      examine_result(frame, argument.tensor, frame.name_of(argument), first);
  conclude(frame, first);
}

void end(const at::RecordFunction& record, at::ObserverContext* context) {
  auto* const frame = static_cast<Frame*>(context);
  if (frame == nullptr) return;
  ThreadTrace& trace = ThreadTrace::of_this_thread();
  trace.innermost = frame->caller;
  if (!frame->state->is_looking() || std::uncaught_exceptions() > frame->exceptions) return;
  try {
    const QuietScope quiet;
    if (frame->op != nullptr) {
      leave_operator(*frame, record);
    } else if (frame->node != nullptr) {
      trace.last_node = frame->node.get();
      conclude_node(*frame);
    }
  } catch (const std::exception& error) {
    frame->state->failed(record.name() + std::string(": ") + error.what());
  }
}

}  // namespace

Watch::Watch() : OperatorCallbacks(&start, &end) {}

}  // namespace semitone::report
