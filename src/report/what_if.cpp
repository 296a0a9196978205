#include "semitone/report/what_if.h"

#include "semitone/core/dtype.h"
#include "src/core/operator_inputs.h"
#include "src/report/operator_callbacks.h"
#include "src/report/operator_info.h"
#include "src/report/tensor_values.h"
#include "src/report/what_if_state.h"

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/utils.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <exception>
#include <utility>

// LibTorch calls begin() before and finish() after each operator and each node of the graph. Neither
// may throw: LibTorch would swallow it.
namespace semitone::report {
namespace {

// What this thread is executing.
struct WhatIfTrace {
  const std::string* layer = nullptr;  // the layer of the examined operator in progress
  std::string node_layer;              // of the node of the graph in progress
};
thread_local WhatIfTrace trace;

// An examined operator, or a node of the graph, in progress.
struct Examined : at::ObserverContext {
  explicit Examined(WhatIfState& its_state) : state(its_state) {}

  WhatIfState& state;
  std::optional<WhatIfState::Call> call{};  // none: a node
  std::string outer_layer{};
};

WhatIfState* state_in_force() {
  return static_cast<WhatIfState*>(c10::ThreadLocalDebugInfo::get(kWhatIfState));
}

std::unique_ptr<at::ObserverContext> enter_graph_node(WhatIfState& state,
                                                      const at::RecordFunction& record) {
  auto node = std::make_unique<Examined>(state);
  node->outer_layer =
      std::exchange(trace.node_layer,
                    state.layer_of(WhatIfState::NodeId{record.forwardThreadId(), record.seqNr()}));
  return node;
}

// Of the generator among the arguments, or the default one of the first tensor's device. That an
// operator draws from it is not in its schema: lstm does.
RandomNumbers random_numbers_of(const std::vector<c10::IValue>& arguments) {
  for (const c10::IValue& value : arguments)
    if (value.isGenerator() && value.toGenerator().defined())
      return RandomNumbers(value.toGenerator());
  for (const c10::IValue& value : arguments) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const c10::Device device = value.toTensor().device();
    if (device.is_cpu() || device.is_cuda())
      return RandomNumbers(at::globalContext().defaultGenerator(device));
  }
  return {};
}

std::unique_ptr<at::ObserverContext> enter_examined(WhatIfState& state, const OperatorInfo& info,
                                                    const at::RecordFunction& record) {
  const auto op = c10::Dispatcher::singleton().findSchema(*record.operator_name());
  const auto inputs = last(inputs_of(record), info.arguments.size());
  if (!op.has_value() || inputs.size() < info.arguments.size()) return nullptr;
  auto examined = std::make_unique<Examined>(state);
  const std::vector<c10::IValue> arguments(inputs.begin(), inputs.end());
  examined->call.emplace(WhatIfState::Call{{}, *op, arguments, random_numbers_of(arguments)});
  WhatIfRow& row = examined->call->row;
  row.op = without_overload(info.name);
  row.backward = torch::autograd::get_current_node() != nullptr;
  if (row.backward) row.layer = trace.node_layer;
  if (row.layer.empty()) row.layer = state.layer_of(arguments);
  trace.layer = &row.layer;
  return examined;
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& record) {
  WhatIfState* const state = state_in_force();
  if (state == nullptr) return nullptr;
  try {
    const QuietScope quiet;
    if (record.scope() == at::RecordScope::BACKWARD_FUNCTION)
      return enter_graph_node(*state, record);
    const OperatorInfo* const info = operator_of(record);
    if (info == nullptr) return nullptr;
    std::unique_ptr<at::ObserverContext> examined;
    if (trace.layer == nullptr && info->written.empty() &&
        state->examines(without_overload(info->name)))
      examined = enter_examined(*state, *info, record);
    // The operators inside make the nodes.
    if (trace.layer != nullptr && record.seqNr() >= 0)
      state->set_layer({record.threadId(), record.seqNr()}, *trace.layer);
    return examined;
  } catch (const std::exception& error) {
    trace.layer = nullptr;
    state->failed(record.name() + std::string(": ") + error.what());
    return nullptr;
  }
}

void finish(const at::RecordFunction& record, at::ObserverContext* context) {
  auto* const examined = static_cast<Examined*>(context);
  if (examined == nullptr) return;
  if (!examined->call.has_value()) {
    trace.node_layer = std::move(examined->outer_layer);
    return;
  }
  trace.layer = nullptr;
  const auto results = last(record.outputs(), examined->call->op.schema().returns().size());
  // Without results, the operator has thrown.
  if (results.empty() || state_in_force() != &examined->state) return;
  try {
    const QuietScope quiet;
    const torch::NoGradGuard no_grad;
    examined->state.examine(*examined->call, results.vec());
  } catch (const std::exception& error) {
    examined->state.failed(record.name() + std::string(": ") + error.what());
  }
}

std::string label_of(const WhatIfRow& row) {
  return fmt::format("{} {}{}", row.backward ? "backward" : "forward", row.op,
                     row.layer.empty() ? "" : " in " + row.layer);
}

}  // namespace

struct WhatIf::Impl {
  Impl(const torch::nn::Module& model, const WhatIfOptions& options)
      : state(std::make_shared<WhatIfState>(model, options)),
        in_force(kWhatIfState, [kept = state](const c10::DebugInfoBase*) { return kept; }),
        callbacks(&begin, &finish) {}
  ~Impl() {
    if (in_force.end() == ThreadStateGuard::End::elsewhere) callbacks.abandon();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  std::shared_ptr<WhatIfState> state;
  ThreadStateGuard in_force;
  OperatorCallbacks callbacks;
};

WhatIf::WhatIf(const torch::nn::Module& model, const WhatIfOptions& options)
    : impl_(std::make_unique<Impl>(model, options)) {}

WhatIf::~WhatIf() = default;

void WhatIf::next_step() {
  impl_->state->next_step();
}

std::vector<WhatIfRow> WhatIf::rows() const {
  return impl_->state->rows();
}

std::string WhatIf::to_string() const {
  const std::vector<WhatIfRow> all = rows();
  std::size_t width = 8;
  for (const WhatIfRow& row : all) width = std::max(width, label_of(row).size());
  std::string text =
      fmt::format("{:<{}}  {:>6}  {:<14} {:>9} {:>10} {:>10} {:>10}\n", "operator", width, "calls",
                  "format", "error", "underflow", "overflow", "inf, NaN");
  for (const WhatIfRow& row : all) {
    for (const FormatEffect& effect : row.effects) {
      const bool is_first = &effect == &row.effects.front();
      text += fmt::format("{:<{}}  {:>6}  {:<14} {:>8.3f}% {:>9.3f}% {:>9.3f}% {:>10}\n",
                          is_first ? label_of(row) : "", width,
                          is_first ? fmt::format("{}", row.calls) : "", dtype_name(effect.format),
                          100 * effect.error, 100 * effect.underflow, 100 * effect.overflow,
                          effect.non_finite);
    }
  }
  return text;
}

std::string WhatIf::to_json() const {
  auto list = nlohmann::ordered_json::array();
  for (const WhatIfRow& row : rows()) {
    auto effects = nlohmann::ordered_json::array();
    for (const FormatEffect& effect : row.effects) {
      effects.push_back({{"format", dtype_name(effect.format)},
                         {"error", effect.error},
                         {"underflow", effect.underflow},
                         {"overflow", effect.overflow},
                         {"non_finite", effect.non_finite}});
    }
    list.push_back({{"op", row.op},
                    {"layer", row.layer},
                    {"backward", row.backward},
                    {"calls", row.calls},
                    {"effects", std::move(effects)}});
  }
  return nlohmann::ordered_json{{"rows", std::move(list)}}.dump(
      2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace semitone::report
