#include "semitone/optim/exponential_moving_average.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/archive.h"
#include "src/core/exact_weights.h"
#include "src/core/expanded.h"
#include "src/core/log.h"
#include "src/core/state_mode.h"

#include <torch/csrc/jit/api/module.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <exception>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace semitone::optim {
namespace {

constexpr auto kAverage = "optim.exponential_moving_average";

struct Averaged {
  std::string name;
  at::Tensor tensor;   // of the model
  at::Tensor average;  // undefined before the first update
};

bool is_averaged(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

// The masters of 16-bit weights, and undefined tensors for others. (Weights are fp32 inside
// MixedPrecision::fp32_weights, which takes changes over to the masters.)
std::vector<at::Tensor> masters_of(const std::vector<Averaged>& weights) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(weights.size());
  for (const Averaged& one : weights) tensors.push_back(one.tensor);
  return exact_values_of(tensors);
}

// The dtype in which a tensor is averaged.
c10::ScalarType average_dtype(const at::Tensor& tensor) {
  return is_16bit(tensor.scalar_type()) ? at::kFloat : tensor.scalar_type();
}

// The weight in the dtype of its average: its master, itself, or a copy in fp32.
at::Tensor exact_value(const at::Tensor& tensor, const at::Tensor& master) {
  return master.defined() ? master.detach() : tensor.detach().to(average_dtype(tensor));
}

// Sets a weight, and its master if it has one.
void set_value(const at::Tensor& tensor, const at::Tensor& master, const at::Tensor& value) {
  if (master.defined()) {
    exact_weights_of(tensor)->set(tensor, value);
  } else {
    tensor.detach().copy_(value);
  }
}

using Named = std::vector<std::pair<std::string, at::Tensor>>;

// Of LibTorch's lists of named tensors.
template <typename Tensors>
Named named(const Tensors& tensors) {
  Named all;
  for (const auto& entry : tensors) {
    if constexpr (requires { entry.key(); }) {
      all.emplace_back(entry.key(), entry.value());
    } else {  // of a TorchScript module
      all.emplace_back(entry.name, entry.value);
    }
  }
  return all;
}

}  // namespace

struct ExponentialMovingAverage::Impl {
  Impl(const ExponentialMovingAverageOptions& options_, const Named& parameters,
       const Named& buffers)
      : options(options_) {
    if (!(options.decay() >= 0 && options.decay() <= 1))
      throw Error(kAverage, "a decay in [0, 1]", c10::str(options.decay()));
    std::unordered_set<const c10::TensorImpl*> seen;
    const auto add = [&](const Named& tensors) {
      for (const auto& [name, tensor] : tensors) {
        if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second)
          weights.push_back({name, tensor, {}});
      }
    };
    add(parameters);
    if (weights.empty()) throw Error(kAverage, "a model with parameters", "none");
    if (!options.use_buffers()) return;
    // One that is expanded cannot be written to, neither by the training nor by apply().
    Named written = buffers;
    std::erase_if(written,
                  [](const auto& one) { return one.second.defined() && is_expanded(one.second); });
    add(written);
  }

  ExponentialMovingAverageOptions options;
  std::vector<Averaged> weights;
  std::int64_t updates = 0;
  bool applied = false;

  void require_not_applied(const char* caller) const {
    if (!applied) return;
    throw Error(std::string(kAverage) + "." + caller, "a model with the weights of the training",
                "one that has the averaged weights", "end the scope of apply() first");
  }

  // The weights' values, in the order of `weights`.
  std::vector<at::Tensor> values(const std::vector<at::Tensor>& masters, const char* caller) const {
    std::vector<at::Tensor> all;
    for (const Averaged& one : weights) {
      all.push_back(exact_value(one.tensor, masters[all.size()]));
      if (!one.average.defined() || one.average.sizes() == all.back().sizes()) continue;
      throw Error(std::string(kAverage) + "." + caller,
                  c10::str("'", one.name, "' of shape ", one.average.sizes()),
                  c10::str(all.back().sizes()), "make a new average for another model");
    }
    return all;
  }

  double current_decay() const {
    const auto n = static_cast<double>(updates);
    return options.warmup() ? std::min(options.decay(), (1 + n) / (10 + n)) : options.decay();
  }
};

ExponentialMovingAverage::ExponentialMovingAverage(const torch::nn::Module& model,
                                                   const ExponentialMovingAverageOptions& options)
    : impl_(std::make_shared<Impl>(options, named(model.named_parameters()),
                                   named(model.named_buffers()))) {}

ExponentialMovingAverage::ExponentialMovingAverage(const torch::jit::Module& model,
                                                   const ExponentialMovingAverageOptions& options)
    : impl_(std::make_shared<Impl>(options, named(model.named_parameters()),
                                   named(model.named_buffers()))) {}

ExponentialMovingAverage::ExponentialMovingAverage(ExponentialMovingAverage&&) noexcept = default;
ExponentialMovingAverage& ExponentialMovingAverage::operator=(ExponentialMovingAverage&&) noexcept =
    default;
ExponentialMovingAverage::~ExponentialMovingAverage() = default;

ExponentialMovingAverage::Impl& ExponentialMovingAverage::impl() const {
  if (impl_ != nullptr) return *impl_;
  throw Error(kAverage, "an average of a model", "an object that was moved from");
}

void ExponentialMovingAverage::update() {
  Impl& state = impl();
  state.require_not_applied("update");
  const StateMode mode;
  const auto values = state.values(masters_of(state.weights), "update");
  std::vector<at::Tensor> averages;
  std::vector<at::Tensor> added;
  for (std::size_t i = 0; i < values.size(); ++i) {
    at::Tensor& average = state.weights[i].average;
    if (state.updates == 0 || !is_averaged(values[i])) {
      average = values[i].clone();
      continue;
    }
    // The model may have been moved or cast since.
    const auto dtype = c10::promoteTypes(average.scalar_type(), values[i].scalar_type());
    average = average.to(values[i].device(), dtype);
    averages.push_back(average);
    added.push_back(values[i].to(dtype));
  }
  if (!averages.empty()) at::_foreach_lerp_(averages, added, 1 - state.current_decay());
  ++state.updates;
}

std::int64_t ExponentialMovingAverage::updates() const {
  return impl().updates;
}

struct ExponentialMovingAverage::Applied::Saved {
  std::shared_ptr<Impl> average;
  std::vector<at::Tensor> originals;  // of all weights; none before the first update
};

ExponentialMovingAverage::Applied::Applied(std::unique_ptr<Saved> saved)
    : saved_(std::move(saved)) {}
ExponentialMovingAverage::Applied::Applied(Applied&&) noexcept = default;

ExponentialMovingAverage::Applied::~Applied() {
  try {
    end();
  } catch (const std::exception& error) {
    log()->error(error.what());
    saved_->average->applied = false;  // nothing else can end it
  }
}

void ExponentialMovingAverage::Applied::end() {
  if (saved_ == nullptr) return;
  const StateMode mode;
  const std::vector<Averaged>& weights = saved_->average->weights;
  const std::vector<at::Tensor> masters = masters_of(weights);
  std::exception_ptr first_error;
  for (std::size_t i = 0; i < saved_->originals.size(); ++i) {
    try {
      set_value(weights[i].tensor, masters[i], saved_->originals[i]);
    } catch (...) {  // the other weights get theirs back
      if (first_error == nullptr) first_error = std::current_exception();
    }
  }
  if (first_error != nullptr) std::rethrow_exception(first_error);
  saved_->average->applied = false;
  saved_ = nullptr;
}

ExponentialMovingAverage::Applied ExponentialMovingAverage::apply() {
  Impl& state = impl();
  state.require_not_applied("apply");
  const StateMode mode;
  const std::vector<at::Tensor> masters = masters_of(state.weights);
  const auto values = state.values(masters, "apply");
  auto saved = std::make_unique<Applied::Saved>(Applied::Saved{impl_, {}});
  // All before the first weight changes: weights may share memory.
  for (std::size_t i = 0; i < values.size() && state.updates > 0; ++i) {
    const at::Tensor& tensor = state.weights[i].tensor;
    const bool is_rounded = is_16bit(tensor.scalar_type()) && !masters[i].defined();
    saved->originals.push_back(is_rounded ? tensor.detach().clone() : values[i].clone());
  }
  const std::size_t count = saved->originals.size();
  state.applied = true;
  Applied applied(std::move(saved));  // restores if an exception is thrown
  for (std::size_t i = 0; i < count; ++i)
    set_value(state.weights[i].tensor, masters[i], state.weights[i].average);
  return applied;
}

void ExponentialMovingAverage::save(torch::serialize::OutputArchive& archive) const {
  const Impl& state = impl();
  state.require_not_applied("save");
  archive.write("updates", c10::IValue(state.updates));
  archive.write("tensors", c10::IValue(static_cast<std::int64_t>(state.weights.size())));
  for (std::size_t i = 0; i < state.weights.size(); ++i) {
    archive.write("name" + std::to_string(i), c10::IValue(state.weights[i].name));
    if (state.updates == 0) continue;
    archive.write("average" + std::to_string(i), state.weights[i].average, /*is_buffer=*/true);
  }
}

void ExponentialMovingAverage::load(torch::serialize::InputArchive& archive) {
  const std::string component = std::string(kAverage) + ".load";
  Impl& state = impl();
  state.require_not_applied("load");
  const StateMode mode;
  const auto updates = read_value<std::int64_t>(archive, "updates", component);
  if (updates < 0) throw FileError(component, "'updates' of at least 0", std::to_string(updates));
  const auto saved = read_value<std::int64_t>(archive, "tensors", component);
  const auto must_be = [&](const std::string& here, const std::string& there) {
    if (here != there)
      throw FileError(component, here, there,
                      "was it saved for the same model, and with the same use_buffers?");
  };
  must_be(c10::str(state.weights.size(), " tensors"), c10::str(saved, " tensors"));
  std::vector<at::Tensor> averages(state.weights.size());
  for (std::size_t i = 0; i < averages.size(); ++i) {
    const Averaged& one = state.weights[i];
    must_be("'" + one.name + "'",
            "'" + read_value<std::string>(archive, "name" + std::to_string(i), component) + "'");
    if (updates == 0) continue;
    const auto average = read_value<at::Tensor>(archive, "average" + std::to_string(i), component);
    must_be(c10::str("'", one.name, "' of shape ", one.tensor.sizes()),
            c10::str("'", one.name, "' of shape ", average.sizes()));
    auto dtype = average_dtype(one.tensor);
    // The average of a weight that was cast is as wide as before.
    if (average.is_floating_point() && c10::isFloatingType(dtype))
      dtype = c10::promoteTypes(average.scalar_type(), dtype);
    averages[i] = average.to(one.tensor.device(), dtype, /*non_blocking=*/false, /*copy=*/true);
  }
  for (std::size_t i = 0; i < averages.size(); ++i)
    state.weights[i].average = std::move(averages[i]);
  state.updates = updates;
}

}  // namespace semitone::optim
