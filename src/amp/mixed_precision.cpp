#include "semitone/amp/mixed_precision.h"

#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/core/for_each_module.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace semitone::amp {
namespace {

// The layer of a model with an address, or null.
std::shared_ptr<const torch::nn::Module> find_part(const torch::nn::Module& model,
                                                   const void* identity) {
  std::shared_ptr<const torch::nn::Module> found;
  for_each_module(model, [&](const torch::nn::Module& layer) {
    if (&layer != &model && static_cast<const void*>(&layer) == identity)
      found = layer.shared_from_this();
  });
  return found;
}

bool has_part(const torch::jit::Module& script, const void* identity) {
  for (const torch::jit::Module& module : script.modules()) {
    if (static_cast<const void*>(module._ivalue().get()) == identity) return true;
  }
  return false;
}

}  // namespace

MixedPrecision::Impl::Impl() = default;

MixedPrecision::Impl::~Impl() {
  disown_optimizers();
  withdraw_exact_weights();
}

const Model& MixedPrecision::Impl::of(const void* identity, const char* caller) const {
  for (const Model& model : models) {
    if (model.identity() == identity) return model;
  }
  throw Error(std::string("amp.mixed_precision.") + caller,
              "a model that was given to amp::initialize", "another one",
              "name every model in initialize({model, …}, {optimizer, …})");
}

std::size_t MixedPrecision::Impl::model_with(const void* identity, const char* caller) {
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (models[i].identity() == identity) return i;
  }
  if (const auto found = parts.find(identity);
      found != parts.end() && !found->second.module.expired()) {
    return found->second.model;
  }
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (const torch::nn::Module* module = models[i].module()) {
      const auto part = find_part(*module, identity);
      if (part == nullptr) continue;
      parts.insert_or_assign(identity, Part{part, i});
      return i;
    }
    if (has_part(*models[i].script(), identity)) return i;
  }
  throw Error(
      std::string("amp.mixed_precision.") + caller, "a model that was given to amp::initialize",
      "another one",
      "name every model in initialize({model, …}, {optimizer, …}); their submodules are included");
}

void MixedPrecision::Impl::require_on_device(std::size_t model) const {
  const at::Tensor& tensor = located[model];
  if (!tensor.defined() || tensor.device().type() == properties.device) return;
  throw Error(
      "amp.mixed_precision.forward",
      "a model on " + c10::DeviceTypeName(properties.device, true) + ", where initialize found it",
      "one that was moved to " + tensor.device().str(),
      "move models to their device before amp::initialize");
}

LossScaler& MixedPrecision::Impl::scaler(std::int64_t loss_id, const char* caller) {
  if (loss_id < 0 || loss_id >= static_cast<std::int64_t>(scalers.size())) {
    throw Error(std::string("amp.mixed_precision.") + caller,
                "a loss_id below " + std::to_string(scalers.size()), std::to_string(loss_id),
                "set Options::num_losses to the number of losses");
  }
  return scalers[static_cast<std::size_t>(loss_id)];
}

MixedPrecision::MixedPrecision(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

MixedPrecision::Impl& MixedPrecision::impl() const {
  if (impl_ == nullptr) {
    throw Error("amp.mixed_precision", "what amp::initialize returned",
                "an object that was moved from", "use the one that it was moved to");
  }
  return *impl_;
}

MixedPrecision::MixedPrecision(MixedPrecision&&) noexcept = default;
MixedPrecision& MixedPrecision::operator=(MixedPrecision&&) noexcept = default;
MixedPrecision::~MixedPrecision() = default;

const Properties& MixedPrecision::properties() const {
  return impl().properties;
}

const LossScaler& MixedPrecision::loss_scaler(std::int64_t loss_id) const {
  impl().settle();
  return impl().scaler(loss_id, "loss_scaler");
}

bool MixedPrecision::back_off_loss_scale(std::int64_t loss_id) {
  constexpr auto kCaller = "back_off_loss_scale";
  LossScaler& scaler = impl().scaler(loss_id, kCaller);
  for (const Impl::OptimizerRecord& record : impl().optimizers) {
    if (record.scaled.has_value() && record.scaled->loss_id == loss_id)
      Impl::require_unscaled(record, kCaller);
  }
  impl().settle();
  return impl().properties.enabled && scaler.back_off();
}

std::int64_t MixedPrecision::skipped_steps() const {
  impl().settle();
  std::int64_t sum = 0;
  for (const LossScaler& scaler : impl().scalers) sum += scaler.skipped_steps();
  return sum;
}

std::vector<at::Tensor> MixedPrecision::master_params(torch::optim::Optimizer& optimizer) const {
  impl().note_use();
  auto& record = impl().of(optimizer, "master_params");
  if (record.scaled.has_value() && record.scaled->open)
    Impl::require_unscaled(record, "master_params");
  Impl::require_unchanged_since_clipping(record, "master_params");
  if (record.masters.has_value()) {
    if (impl().fp32_scopes == 0) impl().pull("master_params");
    record.masters->move_deferred_gradients();
    // Also those of a backward past scale_loss, and those that the program has put into the model.
    if (!record.scaled.has_value()) Impl::take_unscaled_gradients(record);
    record.masters->show_gradients();
  }
  std::vector<at::Tensor> parameters;
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    parameters.push_back(parameter);
  });
  return parameters;
}

void MixedPrecision::set_found_inf_hook(FoundInfHook hook) {
  impl().found_inf_hook = std::move(hook);
}

Fp8Scaling MixedPrecision::fp8_scaling() const {
  if (!impl().has_fp8()) {
    throw Error(
        "amp.mixed_precision.fp8_scaling", "a policy with fp8() at O1, O2 or O3", "one without",
        "initialize(model, optimizer, Options(level).policy(CastPolicy::semitone().fp8()))");
  }
  return impl().policy->fp8_scaling();
}

// Running models.

struct MixedPrecision::Region {
  events::PhaseScope forward{events::Phase::forward};
  std::optional<events::Listen> log;
  std::optional<Autocast> autocast;
};

std::shared_ptr<MixedPrecision::Region> MixedPrecision::enter(const void* model) const {
  impl().note_use();
  const std::size_t index = impl().model_with(model, "forward");
  impl().require_on_device(index);
  impl().ran[index] = true;
  impl().require_no_step_past("forward");
  impl().sync("forward");
  impl().refresh_gradients(&impl().models[index], "forward");
  auto region = std::make_shared<Region>();
  if (impl().cast_log != nullptr) region->log.emplace(impl().cast_log);
  if (impl().forward_in_region) region->autocast.emplace(*impl().policy);
  return region;
}

std::shared_ptr<MixedPrecision::Region> MixedPrecision::enter_any() const {
  impl().note_use();
  impl().ran_elsewhere = true;
  impl().require_no_step_past("call");
  impl().sync("call");
  impl().refresh_gradients(nullptr, "call");
  auto region = std::make_shared<Region>();
  if (impl().cast_log != nullptr) region->log.emplace(impl().cast_log);
  if (impl().policy.has_value()) region->autocast.emplace(*impl().policy);
  return region;
}

at::Tensor MixedPrecision::cast_input(const at::Tensor& tensor) const {
  const auto& type = impl().properties.cast_model_type;
  return impl().properties.enabled && type.has_value() ? cast_floating(tensor, *type) : tensor;
}

c10::IValue MixedPrecision::cast_input(const c10::IValue& value) const {
  const auto& type = impl().properties.cast_model_type;
  return impl().properties.enabled && type.has_value() ? cast_floating(value, *type) : value;
}

at::Tensor MixedPrecision::cast_output(const at::Tensor& tensor) const {
  return impl().properties.enabled ? cast_floating(tensor, impl().properties.cast_model_outputs)
                                   : tensor;
}

c10::IValue MixedPrecision::cast_output(const c10::IValue& value) const {
  return impl().properties.enabled ? cast_floating(value, impl().properties.cast_model_outputs)
                                   : value;
}

Autocast MixedPrecision::autocast() const {
  const Properties& properties = impl().properties;
  impl().note_use();
  impl().ran_elsewhere = true;
  if (!impl().policy.has_value())
    return Autocast(properties.device, properties.dtype, /*enabled=*/false);
  if (impl().fp32_scopes == 0) impl().sync("autocast");
  return Autocast(*impl().policy);
}

}  // namespace semitone::amp
