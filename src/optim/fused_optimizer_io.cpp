// Serialisation of optimizers in the layout of torch.optim's C++ archives, with running numbers
// where LibTorch writes addresses. Each reads the other's files.

#include "semitone/core/error.h"
#include "semitone/optim/fused_optimizer.h"
#include "src/core/archive.h"
#include "src/core/state_mode.h"
#include "src/optim/deferred_step.h"
#include "src/optim/fused_state.h"

#include <torch/serialize.h>
#include <torch/types.h>

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace semitone::optim {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr auto kLoad = "optim.load";
constexpr auto kFormat = "1.5.0";  // what torch.optim writes, and insists on
constexpr auto kLow = "master_low";
// The steps of parameters without other state. LibTorch's SGD takes an entry of "state" as one with
// a momentum buffer.
constexpr auto kSteps = "steps";

at::Tensor number_tensor(std::size_t number) {
  return at::scalar_tensor(static_cast<std::int64_t>(number), at::kLong);
}

std::size_t read_size(InputArchive& archive, const std::string& key) {
  const auto tensor = read_value<at::Tensor>(archive, key, kLoad);
  if (tensor.numel() != 1 || tensor.scalar_type() != at::kLong)
    throw FileError(kLoad, "an integer for '" + key + "'", c10::str(tensor.toString()));
  return static_cast<std::size_t>(tensor.item<std::int64_t>());
}

void require_equal(std::size_t got, std::size_t want, const std::string& what) {
  if (got == want) return;
  throw FileError(kLoad, std::to_string(want) + " " + what, std::to_string(got),
                  "was it saved from the same model and optimizer?");
}

// A tensor of an archive, converted to the dtype, layout and device that the parameter requires;
// undefined if the archive has none.
at::Tensor read_like(InputArchive& archive, const std::string& name, const at::Tensor& parameter,
                     c10::ScalarType dtype) {
  const auto stored = find_value<at::Tensor>(archive, name, kLoad);
  if (!stored.has_value() || !stored->defined()) return {};
  if (stored->sizes() != parameter.sizes()) {
    throw FileError(kLoad, c10::str("'", name, "' of shape ", parameter.sizes()),
                    c10::str(stored->sizes()), "was it saved from the same model?");
  }
  at::Tensor tensor = at::empty_like(parameter, parameter.options().dtype(dtype));
  tensor.copy_(*stored);
  return tensor;
}

std::string tensor_key(std::size_t k) {
  return "tensor_" + std::to_string(k);
}

}  // namespace

void FusedState::serialize(OutputArchive& archive) const {
  archive.write("step", c10::IValue(step));
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    if (tensors[k].defined()) archive.write(tensor_key(k), c10::IValue(tensors[k]));
  }
  if (master_low.defined()) archive.write(kLow, c10::IValue(master_low));
}

void FusedState::serialize(InputArchive& archive) {
  step = read_value<std::int64_t>(archive, "step", kLoad);
  for (std::size_t k = 0; k < tensors.size(); ++k)
    tensors[k] = find_value<at::Tensor>(archive, tensor_key(k), kLoad).value_or(at::Tensor());
  master_low = find_value<at::Tensor>(archive, kLow, kLoad).value_or(at::Tensor());
}

void FusedOptimizer::save(OutputArchive& archive) const {
  const at::NoGradGuard no_grad;
  archive.write("pytorch_version", c10::IValue(kFormat));
  OutputArchive states(archive.compilation_unit());
  OutputArchive steps(archive.compilation_unit());
  OutputArchive groups(archive.compilation_unit());
  groups.write("param_groups/size", number_tensor(param_groups_.size()));
  std::unordered_map<const c10::TensorImpl*, std::string> numbers;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& group = param_groups_[g];
    OutputArchive stored(archive.compilation_unit());
    stored.write("params/size", number_tensor(group.params().size()));
    for (std::size_t i = 0; i < group.params().size(); ++i) {
      const at::Tensor& parameter = group.params()[i];
      const auto [entry, is_new] =
          numbers.emplace(parameter.unsafeGetTensorImpl(), std::to_string(numbers.size()));
      stored.write("params/" + std::to_string(i), c10::IValue(entry->second));
      const FusedState* state = find(parameter);
      if (!is_new || state == nullptr) continue;
      OutputArchive one(archive.compilation_unit());
      one.write("step", c10::IValue(state->step));
      // LibTorch's optimizers take a state under "state" for complete.
      bool has_tensors = false;
      const std::vector<Slot> names = slots(group.options());
      for (std::size_t k = 0; k < names.size(); ++k) {
        const at::Tensor& tensor = state->tensors[k];
        if (!tensor.defined()) continue;
        has_tensors = true;
        // LibTorch's optimizers would continue in bf16, rounding to nearest.
        const bool narrow = tensor.scalar_type() == at::kBFloat16;
        one.write(std::string(names[k].name), c10::IValue(narrow ? tensor.to(at::kFloat) : tensor));
      }
      if (state->master_low.defined()) one.write(kLow, c10::IValue(state->master_low));
      (has_tensors ? states : steps).write(entry->second, one);
    }
    OutputArchive options(archive.compilation_unit());
    group.options().serialize(options);
    stored.write("options", options);
    groups.write("param_groups/" + std::to_string(g), stored);
  }
  archive.write("state", states);
  archive.write(kSteps, steps);
  archive.write("param_groups", groups);
}

void FusedOptimizer::load(InputArchive& archive) {
  const StateMode mode;
  const auto format = read_value<std::string>(archive, "pytorch_version", kLoad);
  if (format != kFormat) throw FileError(kLoad, c10::str("format ", kFormat), format);
  InputArchive states = read_archive(archive, "state", kLoad);
  auto steps = find_archive(archive, kSteps, kLoad);
  InputArchive groups = read_archive(archive, "param_groups", kLoad);
  require_equal(read_size(groups, "param_groups/size"), param_groups_.size(), "parameter groups");

  // Everything is read and checked before anything is changed.
  std::unordered_set<std::string> keys;
  std::vector<InputArchive> new_options;
  ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>> new_state;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& group = param_groups_[g];
    InputArchive stored = read_archive(groups, "param_groups/" + std::to_string(g), kLoad);
    require_equal(read_size(stored, "params/size"), group.params().size(),
                  "parameters in group " + std::to_string(g));
    InputArchive& stored_options = new_options.emplace_back(read_archive(stored, "options", kLoad));
    const auto options = group.options().clone();
    options->serialize(stored_options);
    keep_storage(*options, group.options());
    check(*options);
    for (std::size_t i = 0; i < group.params().size(); ++i) {
      const at::Tensor& parameter = group.params()[i];
      const auto key = read_value<std::string>(stored, "params/" + std::to_string(i), kLoad);
      // The place of a parameter that occurred before: an empty tensor (DistinctParameters).
      if (!keys.insert(key).second && parameter.numel() == 0) continue;
      auto one = find_archive(states, key, kLoad);
      if (!one.has_value() && steps.has_value()) one = find_archive(*steps, key, kLoad);
      // The lower halves belong to the weights, which a file without them does not change.
      const FusedState* const current = find(parameter);
      const at::Tensor low = current == nullptr ? at::Tensor() : current->master_low;
      if (!one.has_value() && !low.defined()) continue;
      auto state = std::make_unique<FusedState>();
      state->master_low = low;
      state->hold_address_of(parameter);
      auto& loaded = new_state[parameter.unsafeGetTensorImpl()];
      if (!one.has_value()) {
        loaded = std::move(state);
        continue;
      }
      state->step = find_value<std::int64_t>(*one, "step", kLoad).value_or(0);
      const auto dtype = state_dtype(*options, parameter);
      const std::vector<Slot> names = slots(*options);
      for (std::size_t k = 0; k < names.size(); ++k) {
        const std::string name(names[k].name);
        state->tensors[k] = names[k].number
                                ? read_like(*one, name, parameter.new_empty({}), at::kDouble)
                                : read_like(*one, name, parameter, dtype);
      }
      if (const at::Tensor stored_low = read_like(*one, kLow, parameter, at::kShort);
          stored_low.defined())
        state->master_low = stored_low;
      loaded = std::move(state);
    }
  }
  deferred_.reset();  // the state that its result may change is replaced
  // In place, as LibTorch's optimizers do: the program may hold references to options.
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    auto& options = param_groups_[g].options();
    const auto before = options.clone();
    options.serialize(new_options[g]);
    keep_storage(options, *before);
  }
  state_ = std::move(new_state);
}

}  // namespace semitone::optim
