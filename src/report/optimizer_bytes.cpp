#include "src/report/optimizer_bytes.h"

#include "src/report/operator_callbacks.h"

#include <torch/optim/lbfgs.h>
#include <torch/serialize/archive.h>

#include <memory>
#include <string>

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

// LibTorch's states do not list their tensors, but save and load them by name.
std::int64_t state_bytes(const torch::optim::OptimizerParamState& state) {
  if (const auto* const lbfgs = dynamic_cast<const torch::optim::LBFGSParamState*>(&state))
    return history_bytes(*lbfgs);
  std::string saved;
  {
    torch::serialize::OutputArchive archive;
    state.serialize(archive);
    archive.save_to([&](const void* data, std::size_t size) {
      saved.append(static_cast<const char*>(data), size);
      return size;
    });
  }
  torch::serialize::InputArchive archive;
  archive.load_from(saved.data(), saved.size());
  std::int64_t bytes = 0;
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    if (archive.try_read(key, value)) bytes += bytes_of_value(value);
  }
  return bytes;
}

}  // namespace

std::int64_t OptimizerBytes::bytes() {
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
