#include "src/autocast/fp8_state.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/autocast/parameter_globs.h"
#include "src/core/archive.h"
#include "src/core/dtype_limits.h"
#include "src/core/replica_parameters.h"
#include "src/kernels/fp8.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace semitone::amp {
namespace {

constexpr auto kFp8 = "amp.cast_policy.fp8";
constexpr auto kScaling = "amp.fp8_scaling";

at::Tensor tensor_of(const std::vector<float>& values) {
  return torch::tensor(values, at::kFloat);
}

std::vector<float> values_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kCPU).contiguous();
  const auto* const data = flat.const_data_ptr<float>();
  return {data, data + flat.numel()};
}

// Of the values that amaxes and scales have.
void require_in_range(const at::Tensor& tensor, const std::string& key) {
  if (!tensor.isfinite().all().item<bool>() || tensor.lt(0).any().item<bool>())
    throw FileError(kScaling, "finite numbers of at least 0 for '" + key + "'", "others");
}

at::Tensor read_numbers(torch::serialize::InputArchive& archive, const std::string& key,
                        at::IntArrayRef sizes) {
  const auto tensor = read_value<at::Tensor>(archive, key, kScaling);
  if (tensor.scalar_type() != at::kFloat || tensor.sizes() != sizes) {
    throw FileError(kScaling, c10::str("float32 of the shape ", sizes, " for '", key, "'"),
                    c10::str(dtype_name(tensor.scalar_type()), " of ", tensor.sizes()),
                    "use the model and the amax_history of the saved run");
  }
  require_in_range(tensor, key);
  return tensor;
}

}  // namespace

void check(const Fp8Options& options) {
  for (const c10::ScalarType format : {options.forward(), options.backward()}) {
    if (!kernels::is_fp8(format))
      throw Error(kFp8, "float8_e4m3fn or float8_e5m2", dtype_name(format));
  }
  if (options.amax_history() < 1 || options.amax_history() > (1 << 20))
    throw Error(kFp8, "an amax_history of 1 to 1048576 steps",
                std::to_string(options.amax_history()));
  if (options.margin() < 0 || options.margin() > 16)
    throw Error(kFp8, "a margin of 0 to 16", std::to_string(options.margin()));
}

Fp8State::Fp8State(const Fp8Options& options, const Named& parameters) : options_(options) {
  check(options_);
  std::vector<std::string> names;
  names.reserve(parameters.size());
  for (const auto& [name, parameter] : parameters) names.push_back(name);
  std::set<std::size_t> kept;
  for (const std::string& glob : options_.keep_16bit_params()) {
    const auto found = matching(glob, names, kFp8);
    kept.insert(found.begin(), found.end());
  }
  for (const std::size_t i : kept) {
    left_out_.push_back(parameters[i].second);
    in_16_bits_.insert(parameters[i].second.impl._unsafe_get_target());
  }
  for (const auto& [name, parameter] : parameters) {
    const c10::TensorImpl* const address = parameter.impl._unsafe_get_target();
    if (in_16_bits_.contains(address) || address->dim() < 2) continue;
    // A shared parameter has several names, and one place.
    if (!by_address_.emplace(address, names_.size()).second) continue;
    names_.push_back(name);
    weights_.push_back(parameter);
  }
  amax_.resize(names_.size() * kRoles);
  scales_.resize(names_.size() * kRoles);
}

std::optional<std::size_t> Fp8State::find(const at::Tensor& tensor) const {
  auto found = by_address_.find(original_of(tensor));
  if (found == by_address_.end() && tensor.is_view())
    found = by_address_.find(original_of(at::Tensor(tensor._base())));
  return found == by_address_.end() ? std::nullopt : std::optional(found->second);
}

bool Fp8State::stays_in_16_bits(const at::Tensor& tensor) const {
  return in_16_bits_.contains(original_of(tensor)) ||
         (tensor.is_view() && in_16_bits_.contains(original_of(at::Tensor(tensor._base()))));
}

float Fp8State::scale_for(float amax, Fp8Role role) const {
  if (amax == 0) return 1;
  const double scale = std::ldexp(dtype_limits(format(role)).max / static_cast<double>(amax),
                                  -static_cast<int>(options_.margin()));
  return static_cast<float>(
      std::min(scale, static_cast<double>(std::numeric_limits<float>::max())));
}

Fp8State::Rounded Fp8State::round(std::size_t weight, Fp8Role role, const at::Tensor& tensor,
                                  bool records) {
  const std::size_t slot = place(weight, role);
  float scale = 0;
  {
    const std::lock_guard lock(mutex_);
    scale = scales_[slot];
  }
  if (scale == 0) scale = scale_for(kernels::finite_amax(tensor), role);
  kernels::Fp8Values rounded = kernels::to_fp8(tensor, format(role), scale);
  if (records) {
    const std::lock_guard lock(mutex_);
    amax_[slot] = std::max(amax_[slot], rounded.amax);
  }
  return {std::move(rounded.values), scale};
}

std::vector<float> Fp8State::agreed(const Fp8Scaling::AmaxHook& hook,
                                    const std::vector<float>& amax) const {
  const events::PhaseScope waiting(events::Phase::communication);
  const auto weight =
      weights_.empty() ? decltype(weights_.front().impl.lock())() : weights_.front().impl.lock();
  const at::Device device = weight.defined() ? weight->device() : at::Device(at::kCPU);
  const at::Tensor given = tensor_of(amax).to(device);
  at::Tensor result = given;
  hook(result);
  const bool fits = result.defined() && result.scalar_type() == at::kFloat &&
                    result.sizes() == given.sizes() && result.isfinite().all().item<bool>() &&
                    result.ge(0).all().item<bool>();
  if (!fits) {
    throw Error(
        "amp.fp8_scaling.update",
        c10::str("a hook that leaves float32 numbers of at least 0, of the shape ", given.sizes()),
        result.defined() ? c10::str(dtype_name(result.scalar_type()), " of ", result.sizes(),
                                    ", or numbers that are negative or not finite")
                         : "an undefined tensor",
        "reduce the tensor in place, with a MAX all-reduce");
  }
  return values_of(result);
}

void Fp8State::update() {
  std::vector<float> amax;
  Fp8Scaling::AmaxHook hook;
  {
    const std::lock_guard lock(mutex_);
    amax = amax_;
    hook = hook_;
  }
  // Without the lock: it may ask for the scales.
  if (hook) amax = agreed(hook, amax);
  const std::lock_guard lock(mutex_);
  std::fill(amax_.begin(), amax_.end(), 0.0F);
  if (history_.size() < static_cast<std::size_t>(options_.amax_history())) {
    history_.push_back(std::move(amax));
  } else {
    history_[oldest_] = std::move(amax);
    oldest_ = (oldest_ + 1) % history_.size();
  }
  std::vector<float> largest(amax_.size());
  for (const std::vector<float>& step : history_)
    for (std::size_t i = 0; i < largest.size(); ++i) largest[i] = std::max(largest[i], step[i]);
  for (std::size_t i = 0; i < largest.size(); ++i)
    if (largest[i] > 0) scales_[i] = scale_for(largest[i], static_cast<Fp8Role>(i % kRoles));
}

void Fp8State::discard() {
  const std::lock_guard lock(mutex_);
  std::fill(amax_.begin(), amax_.end(), 0.0F);
}

void Fp8State::set_amax_hook(Fp8Scaling::AmaxHook hook) {
  const std::lock_guard lock(mutex_);
  hook_ = std::move(hook);
}

std::vector<Fp8Scaling::Scales> Fp8State::scales() const {
  const std::lock_guard lock(mutex_);
  std::vector<Fp8Scaling::Scales> scales;
  scales.reserve(names_.size());
  for (std::size_t i = 0; i < names_.size(); ++i) {
    scales.push_back({names_[i], scales_[place(i, Fp8Role::input)],
                      scales_[place(i, Fp8Role::weight)], scales_[place(i, Fp8Role::gradient)]});
  }
  return scales;
}

void Fp8State::save(torch::serialize::OutputArchive& archive) const {
  const std::lock_guard lock(mutex_);
  const auto places = static_cast<std::int64_t>(amax_.size());
  const auto steps = static_cast<std::int64_t>(history_.size());
  at::Tensor history = at::zeros({steps, places}, at::kFloat);
  for (std::int64_t i = 0; i < steps; ++i)
    history[i].copy_(
        tensor_of(history_[(oldest_ + static_cast<std::size_t>(i)) % history_.size()]));
  c10::List<std::string> names;
  for (const std::string& name : names_) names.push_back(name);
  archive.write("weights", c10::IValue(names));
  archive.write("amax_history", c10::IValue(options_.amax_history()));
  archive.write("margin", c10::IValue(options_.margin()));
  archive.write("forward", c10::IValue(dtype_name(options_.forward())));
  archive.write("backward", c10::IValue(dtype_name(options_.backward())));
  archive.write("amax", tensor_of(amax_), /*is_buffer=*/true);
  archive.write("scales", tensor_of(scales_), /*is_buffer=*/true);
  archive.write("history", history, /*is_buffer=*/true);
}

// Scales hold for a format and a margin, and the history for its length.
void Fp8State::require_saved_options(torch::serialize::InputArchive& archive) const {
  const auto require = [](const char* name, const std::string& own, const std::string& saved) {
    if (own != saved)
      throw FileError(kScaling, c10::str("'", name, "' of ", own), saved,
                      "use the Fp8Options of the saved run");
  };
  for (const auto& [name, own] :
       {std::pair{"amax_history", options_.amax_history()}, {"margin", options_.margin()}})
    require(name, std::to_string(own),
            std::to_string(read_value<std::int64_t>(archive, name, kScaling)));
  for (const auto& [name, own] :
       {std::pair{"forward", options_.forward()}, {"backward", options_.backward()}})
    require(name, dtype_name(own), read_value<std::string>(archive, name, kScaling));
}

void Fp8State::load(torch::serialize::InputArchive& archive) {
  require_saved_options(archive);
  const std::lock_guard lock(mutex_);
  c10::IValue saved_names;
  const bool has_names = archive.try_read("weights", saved_names) && saved_names.isList();
  std::vector<std::string> names;
  if (has_names) {
    for (const c10::IValue& name : saved_names.toListRef())
      names.push_back(name.isString() ? name.toStringRef() : std::string());
  }
  if (names != names_) {
    throw FileError(kScaling, c10::str(names_.size(), " weights in fp8, as in this model"),
                    c10::str(names.size(), names.size() == names_.size() ? " others" : ""),
                    "use the model and the options of the saved run");
  }
  const auto places = static_cast<std::int64_t>(amax_.size());
  const at::Tensor amax = read_numbers(archive, "amax", {places});
  const at::Tensor scales = read_numbers(archive, "scales", {places});
  const auto saved_steps = read_value<at::Tensor>(archive, "history", kScaling);
  const std::int64_t steps = saved_steps.dim() == 2 ? saved_steps.size(0) : 0;
  if (steps > options_.amax_history())
    throw FileError(kScaling, "at most amax_history steps", std::to_string(steps));
  const at::Tensor history = read_numbers(archive, "history", {steps, places});
  amax_ = values_of(amax);
  scales_ = values_of(scales);
  history_.clear();
  history_.reserve(static_cast<std::size_t>(steps));
  for (std::int64_t i = 0; i < steps; ++i) history_.push_back(values_of(history[i]));
  oldest_ = 0;
}

void Fp8Scaling::update() {
  state_->update();
}
void Fp8Scaling::discard() {
  state_->discard();
}
void Fp8Scaling::set_amax_hook(AmaxHook hook) {
  state_->set_amax_hook(std::move(hook));
}
std::vector<Fp8Scaling::Scales> Fp8Scaling::scales() const {
  return state_->scales();
}
void Fp8Scaling::save(torch::serialize::OutputArchive& archive) const {
  state_->save(archive);
}
void Fp8Scaling::load(torch::serialize::InputArchive& archive) {
  state_->load(archive);
}

}  // namespace semitone::amp
