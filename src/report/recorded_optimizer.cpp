#include "src/report/recorded_optimizer.h"

#include "src/report/operator_callbacks.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize/archive.h>

#include <nlohmann/json.hpp>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>

namespace semitone::report {
namespace {

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
}

std::int64_t bytes_of_value(const c10::IValue& value) {
  std::int64_t bytes = 0;
  for_tensors(value, [&](const at::Tensor& tensor, std::int64_t) { bytes += bytes_of(tensor); });
  return bytes;
}

// LibTorch cannot save the undefined tensors that `al` has until the history is full.
std::int64_t history_bytes(const torch::optim::LBFGSParamState& state) {
  std::int64_t bytes =
      bytes_of(state.d()) + bytes_of(state.H_diag()) + bytes_of(state.prev_flat_grad());
  const auto add = [&](const auto& tensors) {
    for (const at::Tensor& tensor : tensors) bytes += bytes_of(tensor);
  };
  add(state.old_dirs());
  add(state.old_stps());
  add(state.ro());
  if (state.al().has_value()) add(*state.al());
  return bytes;
}

// What a state or the options of a group save; nothing if their class does not say how. LibTorch's
// classes do not list their values, but save and load them by name.
template <typename Saved>
std::optional<torch::serialize::InputArchive> saved_values(const Saved& values) {
  std::string saved;
  {
    torch::serialize::OutputArchive archive;
    try {
      values.serialize(archive);
    } catch (const c10::Error&) {
      return std::nullopt;
    }
    archive.save_to([&](const void* data, std::size_t size) {
      saved.append(static_cast<const char*>(data), size);
      return size;
    });
  }
  torch::serialize::InputArchive archive;
  archive.load_from(saved.data(), saved.size());
  return archive;
}

std::int64_t state_bytes(const torch::optim::OptimizerParamState& state) {
  if (const auto* const lbfgs = dynamic_cast<const torch::optim::LBFGSParamState*>(&state))
    return history_bytes(*lbfgs);
  auto archive = saved_values(state);
  if (!archive.has_value()) return 0;
  std::int64_t bytes = 0;
  for (const std::string& key : archive->keys()) {
    c10::IValue value;
    if (archive->try_read(key, value)) bytes += bytes_of_value(value);
  }
  return bytes;
}

// "Adam" for torch::optim::Adam.
std::string name_of(const std::type_info& type) {
  const std::string name = c10::demangle(type.name());
  const auto colon = name.rfind(':');
  return colon == std::string::npos ? name : name.substr(colon + 1);
}

// "Adam" for torch::optim::AdamOptions.
std::string rule_of(const torch::optim::OptimizerOptions& options) {
  constexpr std::string_view kSuffix = "Options";
  std::string name = name_of(typeid(options));
  if (name.ends_with(kSuffix)) name.resize(name.size() - kSuffix.size());
  return name;
}

// What is added to the denominator of the update.
std::optional<double> eps_of(const torch::optim::OptimizerOptions& options) {
  auto archive = saved_values(options);
  c10::IValue eps;
  if (!archive.has_value() || !archive->try_read("eps", eps) || !eps.isDouble())
    return std::nullopt;
  return eps.toDouble();
}

nlohmann::ordered_json describe_group(const torch::optim::OptimizerParamGroup& group) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!group.params().empty()) json["dtype"] = c10::toString(group.params().front().scalar_type());
  if (!group.has_options()) return json;
  json["rule"] = rule_of(group.options());
  if (const auto eps = eps_of(group.options())) json["eps"] = *eps;
  return json;
}

}  // namespace

nlohmann::ordered_json RecordedOptimizer::describe() const {
  auto groups = nlohmann::ordered_json::array();
  for (const auto& group : optimizer_.param_groups()) groups.push_back(describe_group(group));
  return {{"type", name_of(typeid(optimizer_))}, {"groups", std::move(groups)}};
}

std::int64_t RecordedOptimizer::bytes() {
  const auto& states = optimizer_.state();
  // LBFGS keeps a history, which grows.
  const bool grows = dynamic_cast<const torch::optim::LBFGS*>(&optimizer_) != nullptr;
  if (parameters_ == states.size() && !grows) return bytes_;
  bytes_ = 0;
  for (const auto& [parameter, state] : states)
    if (state != nullptr) bytes_ += state_bytes(*state);
  parameters_ = states.size();
  return bytes_;
}

}  // namespace semitone::report
