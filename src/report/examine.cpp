#include "src/report/examine.h"

#include "src/core/autograd_node.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::report {
namespace {

constexpr std::string_view kCustom = "torch::autograd::CppNode<";

// The kinds that an operator could have from an argument. One that it wrote to and read has what was
// in it before.
Kinds given_by(const WatchedArgument& argument) {
  if (argument.is_written) return argument.is_overwritten ? Kinds{0} : argument.before;
  return kinds_of(argument.tensor);
}

// "MyFunction" for the node of a custom function; nothing for others.
std::string custom_function(const std::string& node) {
  if (node.rfind(kCustom, 0) != 0) return {};
  std::string name = node.substr(kCustom.size());
  if (!name.empty() && name.back() == '>') name.pop_back();
  constexpr std::string_view kUnnamed = "(anonymous namespace)::";
  const auto unnamed = name.rfind(kUnnamed);
  return unnamed == std::string::npos ? name : name.substr(unnamed + kUnnamed.size());
}

void set_place(NonFiniteFinding& finding, const Place& place) {
  if (place.entry == nullptr) return;
  finding.layer = place.entry->layer;
  finding.is_after_layer = place.is_after;
}

NodeId id_of(const torch::autograd::Node& node) {
  return {node.thread_id(), static_cast<std::int64_t>(node.sequence_nr())};
}

// Describes a node of the graph, and its place in the forward pass.
void set_node(NonFiniteFinding& finding, const CheckState& state, const std::string& name,
              const NodeId& id) {
  finding.backward = true;
  finding.node = name;
  finding.forward_op = custom_function(name);
  const ForwardOp made_by = state.forward_op(id);
  // A custom function is no operator. An operator without gradient may have had its number.
  if (finding.forward_op.empty() && made_by.op != nullptr) finding.forward_op = made_by.op->name;
  if (finding.layer.empty()) set_place(finding, made_by.place);
}

void set_node_in_progress(NonFiniteFinding& finding, const CheckState& state) {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return;
  set_node(finding, state, node->name(), id_of(*node));
}

TensorValues describe(const Frame& frame, const at::Tensor& tensor, const std::string& name) {
  TensorValues values = values_of(tensor, name);
  const auto* const entry = frame.state->entry_of(tensor);
  if (entry != nullptr) values.parameter = entry->name;
  return values;
}

TensorValues describe(const Frame& frame, const WatchedArgument& argument) {
  const std::string name = frame.name_of(argument);
  if (!argument.is_written) return describe(frame, argument.tensor, name);
  TensorValues values;
  values.name = name;
  values.dtype = argument.tensor.scalar_type();
  if (!argument.tensor.is_nested()) values.sizes = argument.tensor.sizes().vec();
  values.overwritten = true;
  const auto* const entry = frame.state->entry_of(argument.tensor);
  if (entry != nullptr) values.parameter = entry->name;
  return values;
}

NonFiniteFinding finding_in(const Frame& frame) {
  NonFiniteFinding finding;
  finding.op = frame.op->name;
  for (const Frame* caller = frame.caller; caller != nullptr; caller = caller->caller)
    if (caller->op != nullptr) finding.called_by.push_back(caller->op->name);
  set_place(finding, frame.place);
  set_node_in_progress(finding, *frame.state);
  for (const WatchedArgument& argument : frame.arguments)
    if (!argument.is_overwritten) finding.arguments.push_back(describe(frame, argument));
  return finding;
}

// Whether a value that was there before any operator that was seen is an error.
bool is_alarming(const Frame& frame, const WatchedArgument& argument, Kinds unknown) {
  if ((unknown & kNan) != 0) return true;
  const auto* const entry = frame.state->entry_of(argument.tensor);
  return unknown != 0 && entry != nullptr && entry->is_parameter;
}

// The node whose gradient an operator met, if the engine called the operator: to add up gradients, or
// in a hook.
std::optional<Producer> producer_for(const Frame& frame, const WatchedArgument& argument) {
  for (const Frame* caller = frame.caller; caller != nullptr; caller = caller->caller)
    if (caller->node != nullptr) return std::nullopt;
  const auto node = torch::autograd::get_current_node();
  // It computes nothing: what a hook meets behind it may be from another rank.
  if (node == nullptr || dynamic_cast<torch::autograd::AccumulateGrad*>(node.get()) != nullptr)
    return std::nullopt;
  if (ThreadTrace::of_this_thread().last_node != node.get()) return frame.state->producer_of(*node);
  // The engine adds this node's gradient, the second argument, to those of others. What operators
  // made would have been found before: it was a custom function.
  if (argument.position == 0) {
    for (Producer& producer : frame.state->producers_beside(*node))
      if (producer.id != id_of(*node) && !custom_function(producer.name).empty()) return producer;
  }
  return Producer{node->name(), id_of(*node)};
}

// A function that made a gradient without operators, or with some that were not seen to return it.
NonFiniteFinding backward_finding(const CheckState& state, const Producer& producer,
                                  TensorValues values) {
  if (producer.inside != nullptr) return *producer.inside;
  NonFiniteFinding finding;
  finding.origin = NonFiniteFinding::Origin::function;
  finding.values = std::move(values);
  set_node(finding, state, producer.name, producer.id);
  finding.op = finding.forward_op.empty() ? finding.node : finding.forward_op;
  return finding;
}

// The custom function that returned a tensor; null if there is none. That of a view is not asked
// for: autograd may have to make it anew, and here it would be without one.
NodePtr function_of(const at::Tensor& tensor) {
  if (tensor.is_view()) return nullptr;
  const auto& node = tensor.grad_fn();
  return node != nullptr && is_custom_function(*node) ? node : nullptr;
}

// The argument may be the result of a custom function, which autograd knows.
NonFiniteFinding outside_finding(const Frame& frame, const WatchedArgument& argument) {
  const CheckState& state = *frame.state;
  // Of a parameter, not of a view of it such as a bias for every row. Of an argument that was changed
  // in place, the values after that.
  const auto* const entry = state.entry_of(argument.tensor);
  TensorValues values =
      describe(frame, entry == nullptr ? argument.tensor : entry->tensor, frame.name_of(argument));
  if (const auto producer = producer_for(frame, argument)) {
    values.name = "gradient";
    return backward_finding(state, *producer, std::move(values));
  }
  const auto node = function_of(argument.tensor);
  NonFiniteFinding finding;
  if (node == nullptr) {
    finding = finding_in(frame);
    finding.origin = NonFiniteFinding::Origin::outside;
  } else {
    finding.origin = NonFiniteFinding::Origin::function;
    finding.op = custom_function(node->name());
    values.name = "result";
    set_place(finding, state.forward_op(id_of(*node)).place);
  }
  finding.values = std::move(values);
  return finding;
}

NonFiniteFinding finding_of(const Frame& frame, const FirstNonFinite& first) {
  if (first.from_outside != nullptr) return outside_finding(frame, *first.from_outside);
  NonFiniteFinding finding = finding_in(frame);
  finding.values = describe(frame, first.result, first.name);
  return finding;
}

}  // namespace

void examine_result(Frame& frame, const at::Tensor& result, const std::string& name,
                    FirstNonFinite& first) {
  CheckState& state = *frame.state;
  Frame* const formula = frame.formula();
  // What a formula makes of such values counts if it is returned, whichever kind it has.
  const bool is_suspect =
      formula != nullptr && (first.result.defined() || formula->found_inside.has_value());
  if (!state.is_looking() || (first.result.defined() && !is_suspect)) return;
  const Kinds kinds = kinds_of(result);
  ThreadTrace::of_this_thread().add_examined(result);
  if (kinds == 0) return;
  if (frame.is_ignored) return state.add_known(result, kinds);
  if (is_suspect) return formula->add_suspect(result);
  Kinds given = frame.numbers;
  const WatchedArgument* from_outside = nullptr;
  for (const WatchedArgument& argument : frame.arguments) {
    if (!can_examine(argument.tensor)) continue;
    const Kinds before = given_by(argument);
    given |= before;
    if (is_alarming(frame, argument, before & ~state.known_kinds(argument.tensor))) {
      from_outside = &argument;
      break;
    }
  }
  if (from_outside == nullptr && (kinds & ~given) == 0) return state.add_known(result, kinds);
  first = {result, name, from_outside};
  if (formula != nullptr) formula->add_suspect(result);
}

void conclude(Frame& frame, const FirstNonFinite& first) {
  if (!first.result.defined()) return;
  const bool is_called = frame.caller != nullptr && frame.caller->op != nullptr;
  Frame* const keeper = is_called ? frame.caller : frame.formula();
  if (is_called) {
    keeper->is_suspicious = true;
    if (first.from_outside != nullptr) return;
  }
  if (keeper != nullptr && keeper->found_inside.has_value()) return;
  const bool has_inner = first.from_outside == nullptr && frame.found_inside.has_value();
  NonFiniteFinding finding = has_inner ? *std::move(frame.found_inside) : finding_of(frame, first);
  if (keeper == nullptr) return frame.state->found(std::move(finding));
  keeper->found_inside = std::move(finding);
}

void examine_gradient(const Frame& frame, const at::Tensor& gradient, std::size_t position) {
  CheckState& state = *frame.state;
  if (!state.is_looking()) return;
  const Kinds kinds = kinds_of(gradient);
  if ((kinds & ~state.known_kinds(gradient)) == 0 || frame.node == nullptr) return;
  TensorValues values = values_of(gradient, "gradient " + std::to_string(position));
  if (const auto* accumulate = dynamic_cast<torch::autograd::AccumulateGrad*>(frame.node.get())) {
    const auto* const entry = state.entry_of(accumulate->variable);
    if (entry != nullptr) values.parameter = entry->name;
  }
  if (const auto producer = state.producer_of(*frame.node))
    return state.found(backward_finding(state, *producer, std::move(values)));
  NonFiniteFinding finding;
  finding.origin = NonFiniteFinding::Origin::outside;
  finding.values = std::move(values);
  set_node(finding, state, frame.node->name(), frame.node_id);
  finding.op = finding.node;
  state.found(std::move(finding));
}

bool is_custom_function(const torch::autograd::Node& node) {
  return !custom_function(node.name()).empty();
}

void conclude_node(Frame& frame) {
  CheckState& state = *frame.state;
  Producer producer{frame.node->name(), frame.node_id, nullptr};
  if (frame.found_inside.has_value()) {
    // A graph of the gradients keeps what is not returned, too: the receiver will see.
    if (at::GradMode::is_enabled()) {
      producer.inside = std::make_shared<const NonFiniteFinding>(*std::move(frame.found_inside));
    } else if (frame.has_returned_suspect()) {
      return state.found(*std::move(frame.found_inside));
    }
  }
  state.add_producer(*frame.node, producer);
}

}  // namespace semitone::report
