#include "src/report/what_if_state.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/report/operator_info.h"
#include "src/report/tensor_values.h"

#include <ATen/Context.h>
#include <c10/util/ScopeExit.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

namespace semitone::report {
namespace {

constexpr auto kWhatIf = "report.what_if";

// Operators that hardware computes in reduced precision: products, convolutions, attention.
constexpr std::array kProducts{"linear",
                               "addmm",
                               "mm",
                               "bmm",
                               "baddbmm",
                               "addbmm",
                               "matmul",
                               "mv",
                               "addmv",
                               "conv1d",
                               "conv2d",
                               "conv3d",
                               "conv_transpose1d",
                               "conv_transpose2d",
                               "conv_transpose3d",
                               "convolution",
                               "convolution_backward",
                               "mkldnn_linear_backward",
                               "scaled_dot_product_attention",
                               "_scaled_dot_product_flash_attention_for_cpu_backward",
                               "_scaled_dot_product_flash_attention_backward",
                               "_scaled_dot_product_efficient_attention_backward"};

std::set<std::string, std::less<>> checked_operators(const std::vector<std::string>& chosen) {
  if (chosen.empty()) return {kProducts.begin(), kProducts.end()};
  std::set<std::string> known;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames())
    known.insert(without_aten(op.name));
  std::set<std::string, std::less<>> names;
  for (const std::string& op : chosen) {
    const std::string name = without_aten(op);
    if (!known.contains(name))
      throw Error(kWhatIf, "names of registered operators, without overload", "'" + op + "'",
                  "use ATen's names, such as conv2d");
    names.insert(name);
  }
  return names;
}

void check(const WhatIfOptions& options) {
  if (options.formats().empty()) throw Error(kWhatIf, "at least one format", "none");
  for (const c10::ScalarType format : options.formats()) {
    if (!is_16bit(format) && !is_fp8(format))
      throw Error(kWhatIf, "float16, bfloat16, float8_e4m3fn or float8_e5m2", dtype_name(format));
  }
  if (options.amax_history() < 1)
    throw Error(kWhatIf, "a history of at least 1 step", fmt::format("{}", options.amax_history()));
}

// Calls visit(tensor) for each tensor of the values, which may replace it.
template <typename Visit>
void for_tensors_in(std::vector<c10::IValue>& values, const Visit& visit) {
  for (c10::IValue& value : values) {
    if (value.isTensor()) {
      at::Tensor tensor = value.toTensor();
      visit(tensor);
      value = tensor;
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) visit(tensor);
      value = tensors;
    }
  }
}

bool is_fp32(const at::Tensor& tensor) {
  return can_examine(tensor) && tensor.scalar_type() == at::kFloat;
}

// The largest absolute value but inf.
double largest_of(const at::Tensor& values) {
  return values.abs().nan_to_num(/*nan=*/0, /*posinf=*/0).max().item<double>();
}

double share(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

RandomNumbers::RandomNumbers(at::Generator generator) : generator_(std::move(generator)) {
  const std::lock_guard lock(generator_.mutex());
  before_ = generator_.get_state();
}

void RandomNumbers::repeat(const std::function<void()>& function) const {
  if (!before_.defined()) return function();
  at::Generator generator = generator_;
  at::Tensor now;
  const auto set = [&](const at::Tensor& state) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  };
  {
    const std::lock_guard lock(generator.mutex());
    now = generator.get_state();
  }
  const auto restore = c10::make_scope_exit([&] { set(now); });
  set(before_);
  function();
}

WhatIfState::WhatIfState(const torch::nn::Module& model, const WhatIfOptions& options)
    : options_(options), operators_(checked_operators(options.operators())) {
  check(options);
  names_.add(model, {});
}

std::string WhatIfState::layer_of(const std::vector<c10::IValue>& arguments) const {
  const std::lock_guard lock(mutex_);
  for (const c10::IValue& value : arguments) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto* const entry = names_.find(value.toTensor());
    if (entry != nullptr && entry->is_parameter) return entry->layer;
  }
  return {};
}

void WhatIfState::set_layer(const NodeId& node, const std::string& layer) {
  const std::lock_guard lock(mutex_);
  // Graphs that live longer lose the names of their layers, and nothing else.
  constexpr std::size_t kMost = 1 << 17;
  if (layers_.size() >= kMost) layers_.clear();
  layers_.insert_or_assign(node, layer);
}

std::string WhatIfState::layer_of(const NodeId& node) const {
  const std::lock_guard lock(mutex_);
  const auto found = layers_.find(node);
  return found == layers_.end() ? std::string() : found->second;
}

WhatIfState::Place& WhatIfState::place_of(const WhatIfRow& row) {
  const auto found = std::find_if(places_.begin(), places_.end(), [&](const Place& place) {
    return place.row.op == row.op && place.row.layer == row.layer &&
           place.row.backward == row.backward;
  });
  if (found != places_.end()) return *found;
  Place& place = places_.emplace_back();
  place.row = row;
  place.sums.resize(options_.formats().size());
  return place;
}

void WhatIfState::examine(const Call& call, const std::vector<c10::IValue>& results) {
  const std::lock_guard lock(mutex_);
  Place& place = place_of(call.row);
  ++place.row.calls;
  std::size_t index = 0;
  std::vector<c10::IValue> tensors = call.arguments;
  for_tensors_in(tensors, [&](const at::Tensor& tensor) {
    const auto key = std::pair(place.calls_in_step, index++);
    if (is_fp32(tensor)) place.amax[key].now = largest_of(tensor);
  });
  for (std::size_t format = 0; format < options_.formats().size(); ++format)
    examine(place, format, call, results);
  ++place.calls_in_step;
}

std::vector<c10::IValue> WhatIfState::round_arguments(
    Place& place, std::size_t format, const std::vector<c10::IValue>& arguments) const {
  const c10::ScalarType dtype = options_.formats()[format];
  Sums& sums = place.sums[format];
  std::vector<c10::IValue> all = arguments;
  std::size_t index = 0;
  for_tensors_in(all, [&](at::Tensor& tensor) {
    const auto key = std::pair(place.calls_in_step, index++);
    // Biases are added to sums in fp32.
    if (!is_fp32(tensor) || (is_fp8(dtype) && tensor.dim() < 2)) return;
    const Amax& amax = place.amax[key];
    const double largest =
        amax.before.empty() ? amax.now : *std::max_element(amax.before.begin(), amax.before.end());
    RoundedValues values = rounded(tensor, dtype, is_fp8(dtype) ? largest : 0);
    sums.numel += values.numel;
    sums.non_zero += values.non_zero;
    sums.underflow += values.underflow;
    sums.overflow += values.overflow;
    tensor = std::move(values.values);
  });
  return all;
}

void WhatIfState::examine(Place& place, std::size_t format, const Call& call,
                          const std::vector<c10::IValue>& results) {
  torch::jit::Stack stack = round_arguments(place, format, call.arguments);
  call.random.repeat([&] { call.op.callBoxed(stack); });
  const c10::ScalarType dtype = options_.formats()[format];
  Sums& sums = place.sums[format];
  for (std::size_t i = 0; i < std::min(stack.size(), results.size()); ++i) {
    if (!stack[i].isTensor() || !results[i].isTensor()) continue;
    const at::Tensor& exact = results[i].toTensor();
    at::Tensor changed = stack[i].toTensor();
    if (!is_fp32(exact) || !is_fp32(changed)) continue;
    if (is_16bit(dtype)) changed = changed.to(dtype).to(at::kFloat);
    const at::Tensor counts = exact.isfinite().logical_and(changed.isfinite());
    sums.non_finite +=
        exact.isfinite().logical_and(changed.isfinite().logical_not()).sum().item<std::int64_t>();
    const at::Tensor was = exact.to(at::kDouble).masked_fill(counts.logical_not(), 0);
    const at::Tensor is = changed.to(at::kDouble).masked_fill(counts.logical_not(), 0);
    sums.changes += (is - was).square().sum().item<double>();
    sums.results += was.square().sum().item<double>();
  }
}

void WhatIfState::failed(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!failure_.has_value()) failure_ = why;
}

void WhatIfState::next_step() {
  const std::lock_guard lock(mutex_);
  names_.refresh();
  layers_.clear();
  for (Place& place : places_) {
    place.calls_in_step = 0;
    for (auto& [key, amax] : place.amax) {
      if (amax.now == 0) continue;
      amax.before.push_back(std::exchange(amax.now, 0));
      if (amax.before.size() > static_cast<std::size_t>(options_.amax_history()))
        amax.before.pop_front();
    }
  }
}

std::vector<WhatIfRow> WhatIfState::rows() const {
  const std::lock_guard lock(mutex_);
  if (failure_.has_value())
    throw Error(kWhatIf, "to compute every operator again", *failure_,
                "leave the operator out of WhatIfOptions::operators");
  std::vector<WhatIfRow> rows;
  rows.reserve(places_.size());
  for (const Place& place : places_) {
    WhatIfRow row = place.row;
    row.effects.reserve(place.sums.size());
    for (std::size_t i = 0; i < place.sums.size(); ++i) {
      const Sums& sums = place.sums[i];
      row.effects.push_back({options_.formats()[i],
                             sums.results == 0 ? 0 : std::sqrt(sums.changes / sums.results),
                             share(sums.underflow, sums.non_zero), share(sums.overflow, sums.numel),
                             sums.non_finite});
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace semitone::report
