#include "semitone/amp/mixed_precision.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/amp/memory_format.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/rank.h"
#include "src/amp/same_memory.h"
#include "src/core/log.h"

#include <torch/types.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

namespace semitone::amp {
namespace {

constexpr auto kInitialize = "amp.initialize";

struct LogCasts : events::Listener {
  using Listener::on;
  void on(const events::Cast& event) override {
    log()->info("{}: {} -> {}, {} elements{}", event.op, dtype_name(event.from),
                dtype_name(event.to), event.numel, event.cached ? " (cached)" : "");
  }
};

void check_model(const Model& model) {
  for (const Model::Entry& entry : model.entries()) {
    if (!entry.tensor.is_floating_point() || entry.tensor.scalar_type() == at::kFloat) continue;
    throw Error(
        kInitialize, "a model in float32",
        dtype_name(entry.tensor.scalar_type()) +
            (entry.is_parameter ? " parameter '" : " buffer '") + entry.name + "'",
        is_16bit(entry.tensor.scalar_type())
            ? "pass the model before casting it: initialize does that. Was it initialized already?"
            : "cast it with ->to(torch::kFloat)");
  }
}

void check_optimizer(torch::optim::Optimizer& optimizer, const Properties& properties) {
  const bool plain = !properties.loss_scale.is_dynamic() && properties.loss_scale.value() == 1 &&
                     !properties.master_weights;
  if (!plain && evaluates_loss(optimizer)) {
    throw Error(kInitialize, "an optimizer that takes its gradients as they are",
                "LBFGS at " + std::string(name_of(properties.opt_level)),
                "it evaluates the loss again inside its step: use O0, or a loss scale of 1 without "
                "master weights");
  }
}

void check_optimizers(const OptimizerRefs& optimizers, const Properties& properties) {
  std::unordered_set<const torch::optim::Optimizer*> seen;
  std::unordered_set<const c10::TensorImpl*> owned;
  for (torch::optim::Optimizer& optimizer : optimizers) {
    if (!seen.insert(&optimizer).second) {
      throw Error(kInitialize, "every optimizer once", "one of them twice");
    }
    if (!properties.enabled) continue;
    check_optimizer(optimizer, properties);
    if (!properties.master_weights) continue;
    std::unordered_set<const c10::TensorImpl*> own;
    for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
      own.insert(parameter.unsafeGetTensorImpl());
    });
    for (const c10::TensorImpl* parameter : own) {
      if (owned.insert(parameter).second) continue;
      throw Error(kInitialize, "every parameter in one optimizer where there are master weights",
                  "one that two optimizers share",
                  "a parameter has one master: make it one optimizer with two groups, or use O1");
    }
  }
}

// The policy of the region that forward runs in, bound to the models; nothing where forward runs in
// none.
std::optional<CastPolicy> policy_for(const std::vector<Model>& models,
                                     const Properties& properties) {
  if (!properties.enabled) return std::nullopt;
  const CastTarget target(properties.device, properties.dtype);
  const CastPolicy given =
      properties.policy.value_or(CastPolicy::semitone(target)).with_target(target);
  if (properties.patch_torch_functions) return given.bind(models);
  const auto& type = properties.cast_model_type;
  if (!type.has_value() || !is_16bit(*type)) return std::nullopt;
  // 16-bit weights: the region emulates what the CPU lacks, and casts for parameters that stay
  // fp32. Elsewhere LibTorch computes 16-bit operators as they should be.
  if (properties.device != c10::DeviceType::CPU && given.fp32_param_globs().empty()) {
    return std::nullopt;
  }
  CastPolicy weights_only =
      CastPolicy::none(target).emulation(given.emulation()).fast_kernels(false);
  for (const std::string& op : given.fast_kernels()) weights_only.fast_kernel(op);
  for (const std::string& glob : given.fp32_param_globs()) weights_only.keep_fp32_params(glob);
  return weights_only.bind(models);
}

// Weights of convolutions are all there is to lay out: what the layers return follows them.
c10::MemoryFormat choose_memory_format(const std::vector<at::Tensor>& weights,
                                       const OptimizerRefs& optimizers,
                                       const Properties& properties,
                                       const std::optional<CastPolicy>& policy) {
  if (properties.memory_format.has_value()) return *properties.memory_format;
  const bool can_view = properties.device == c10::DeviceType::CPU && policy.has_value() &&
                        policy->fast_kernels().count("view") == 1;
  // LBFGS views gradients as vectors.
  const bool views = std::any_of(optimizers.begin(), optimizers.end(), evaluates_loss);
  return !weights.empty() && properties.opt_level != OptLevel::O0 && can_view && !views
             ? c10::MemoryFormat::ChannelsLast
             : c10::MemoryFormat::Preserve;
}

// Casts a model's floating tensors in place. Tensors that share their memory go on sharing it.
void cast_model(const Model& model, c10::ScalarType dtype,
                const std::function<bool(const Model::Entry&)>& keep) {
  std::vector<at::Tensor> tensors;
  std::vector<std::size_t> first;  // of those that share their memory with a tensor
  for (const Model::Entry& entry : model.entries()) {
    const at::Tensor& tensor = entry.tensor;
    if (!tensor.is_floating_point() || tensor.scalar_type() == dtype || keep(entry)) continue;
    const auto known = std::find_if(tensors.begin(), tensors.end(), [&](const at::Tensor& earlier) {
      return same_memory(earlier, tensor);
    });
    first.push_back(static_cast<std::size_t>(known - tensors.begin()));
    tensors.push_back(tensor);
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].set_data(first[i] < i ? tensors[first[i]].variable_data()
                                     : tensors[i].detach().to(dtype));
    if (at::Tensor& grad = tensors[i].mutable_grad(); grad.defined()) grad = grad.to(dtype);
  }
}

}  // namespace

MixedPrecision::Impl::PerOptimizer& MixedPrecision::Impl::of(
    const torch::optim::Optimizer& optimizer, const char* caller) {
  for (PerOptimizer& known : optimizers) {
    if (known.optimizer == &optimizer) return known;
  }
  throw Error(std::string("amp.mixed_precision.") + caller,
              "an optimizer that was given to amp::initialize", "another one",
              "name every optimizer in initialize({model}, {optimizer, …})");
}

const Model& MixedPrecision::Impl::of(const void* identity, const char* caller) const {
  for (const Model& known : models) {
    if (known.identity() == identity) return known;
  }
  throw Error(std::string("amp.mixed_precision.") + caller,
              "a model that was given to amp::initialize", "another one",
              "name every model in initialize({model, …}, {optimizer, …})");
}

LossScaler& MixedPrecision::Impl::scaler(std::int64_t loss_id, const char* caller) {
  if (loss_id < 0 || loss_id >= static_cast<std::int64_t>(scalers.size())) {
    throw Error(std::string("amp.mixed_precision.") + caller,
                "a loss_id below " + std::to_string(scalers.size()), std::to_string(loss_id),
                "set Options::num_losses to the number of losses");
  }
  return scalers[static_cast<std::size_t>(loss_id)];
}

void MixedPrecision::Impl::require_own_dtypes(const char* caller) const {
  if (fp32_scopes > 0) {
    throw Error(std::string("amp.mixed_precision.") + caller, "a call outside of fp32_weights()",
                "one while the weights are fp32", "end the scope of fp32_weights() first");
  }
}

void MixedPrecision::Impl::pull(const char* caller) {
  require_own_dtypes(caller);
  for (PerOptimizer& known : optimizers) {
    if (known.masters.has_value()) known.masters->pull();
  }
}

void MixedPrecision::Impl::sync(const char* caller) {
  require_own_dtypes(caller);
  for (PerOptimizer& known : optimizers) {
    if (known.masters.has_value()) known.masters->sync();
  }
}

MixedPrecision initialize(const Model& model, torch::optim::Optimizer& optimizer,
                          const Options& options) {
  return initialize(std::vector<Model>{model}, OptimizerRefs{optimizer}, options);
}

MixedPrecision initialize(const Model& model, const Options& options) {
  return initialize(std::vector<Model>{model}, OptimizerRefs{}, options);
}

MixedPrecision initialize(const std::vector<Model>& models, const OptimizerRefs& optimizers,
                          const Options& options) {
  if (models.empty()) throw Error(kInitialize, "at least one model", "none");
  auto device = c10::DeviceType::CPU;
  for (const Model& model : models) {
    const auto entries = model.entries();
    if (!entries.empty()) {
      device = entries.front().tensor.device().type();
      break;
    }
  }
  auto impl = std::make_unique<MixedPrecision::Impl>();
  impl->properties = Properties::resolve(options, device);
  const Properties& properties = impl->properties;
  impl->models = models;

  // Everything is checked before anything is changed.
  if (properties.enabled) {
    for (const Model& model : models) check_model(model);
  }
  check_optimizers(optimizers, properties);
  impl->policy = policy_for(models, properties);
  for (std::int64_t i = 0; i < properties.num_losses; ++i) {
    impl->scalers.emplace_back(properties.loss_scale_options, i);
  }

  const at::NoGradGuard no_grad;
  if (properties.enabled) {
    std::vector<at::Tensor> weights;
    for (const Model& model : models) {
      const auto more = conv2d_weights(model);
      weights.insert(weights.end(), more.begin(), more.end());
    }
    const auto format = choose_memory_format(weights, optimizers, properties, impl->policy);
    impl->properties.memory_format = format;
    if (format != c10::MemoryFormat::Preserve) lay_out(weights, format);
  }
  MasterWeights::ExactValues exact;
  if (properties.enabled && properties.cast_model_type.has_value()) {
    if (properties.master_weights) {
      for (torch::optim::Optimizer& optimizer : optimizers) {
        for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
          exact.emplace(parameter.unsafeGetTensorImpl(), parameter.variable_data());
        });
      }
    }
    for (const Model& model : models) {
      cast_model(model, *properties.cast_model_type, [&](const Model::Entry& entry) {
        return (properties.keep_batchnorm_fp32 && entry.keep_fp32) ||
               (impl->policy.has_value() && entry.is_parameter &&
                impl->policy->keeps_fp32(entry.tensor));
      });
    }
  }
  for (torch::optim::Optimizer& optimizer : optimizers) {
    auto& known = impl->optimizers.emplace_back();
    known.optimizer = &optimizer;
    if (properties.enabled && properties.master_weights) known.masters.emplace(optimizer, exact);
  }
  for (std::size_t i = 0; i < models.size(); ++i) {
    impl->names.add(models[i], models.size() == 1 ? "" : "model " + std::to_string(i) + ": ");
  }
  const CudnnSettings& cudnn = properties.cudnn;
  if (cudnn.benchmark || cudnn.benchmark_limit || cudnn.workspace_limit) impl->cudnn.emplace(cudnn);
  if (properties.verbosity >= 2) impl->cast_log = std::make_shared<LogCasts>();
  if (properties.enabled && properties.verbosity >= 1 && is_first_rank()) {
    log()->info(properties.to_string());
  }
  return MixedPrecision(std::move(impl));
}

MixedPrecision::MixedPrecision(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MixedPrecision::MixedPrecision(MixedPrecision&&) noexcept = default;
MixedPrecision& MixedPrecision::operator=(MixedPrecision&&) noexcept = default;
MixedPrecision::~MixedPrecision() = default;

const Properties& MixedPrecision::properties() const {
  return impl_->properties;
}

const LossScaler& MixedPrecision::loss_scaler(std::int64_t loss_id) const {
  return impl_->scaler(loss_id, "loss_scaler");
}

std::int64_t MixedPrecision::skipped_steps() const {
  std::int64_t sum = 0;
  for (const LossScaler& scaler : impl_->scalers) sum += scaler.skipped_steps();
  return sum;
}

std::vector<at::Tensor> MixedPrecision::master_params(torch::optim::Optimizer& optimizer) const {
  auto& known = impl_->of(optimizer, "master_params");
  if (known.masters.has_value()) {
    if (impl_->fp32_scopes == 0) known.masters->pull();
    known.masters->move_deferred_gradients();
  }
  std::vector<at::Tensor> parameters;
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    parameters.push_back(parameter);
  });
  return parameters;
}

void MixedPrecision::set_found_inf_hook(FoundInfHook hook) {
  impl_->found_inf_hook = std::move(hook);
}

// Running models.

struct MixedPrecision::Region {
  std::optional<events::Listen> log;
  std::optional<Autocast> autocast;
};

std::shared_ptr<MixedPrecision::Region> MixedPrecision::enter(const void* model) const {
  impl_->of(model, "forward");
  impl_->sync("forward");
  auto region = std::make_shared<Region>();
  if (impl_->cast_log != nullptr) region->log.emplace(impl_->cast_log);
  if (impl_->policy.has_value()) region->autocast.emplace(*impl_->policy);
  return region;
}

at::Tensor MixedPrecision::cast_input(const at::Tensor& tensor) const {
  const auto& type = impl_->properties.cast_model_type;
  return impl_->properties.enabled && type.has_value() ? cast_floating(tensor, *type) : tensor;
}

c10::IValue MixedPrecision::cast_input(const c10::IValue& value) const {
  const auto& type = impl_->properties.cast_model_type;
  return impl_->properties.enabled && type.has_value() ? cast_floating(value, *type) : value;
}

at::Tensor MixedPrecision::cast_output(const at::Tensor& tensor) const {
  return impl_->properties.enabled ? cast_floating(tensor, impl_->properties.cast_model_outputs)
                                   : tensor;
}

c10::IValue MixedPrecision::cast_output(const c10::IValue& value) const {
  return impl_->properties.enabled ? cast_floating(value, impl_->properties.cast_model_outputs)
                                   : value;
}

Autocast MixedPrecision::autocast() const {
  const Properties& properties = impl_->properties;
  if (properties.enabled && properties.patch_torch_functions) return Autocast(*impl_->policy);
  return Autocast(properties.device, properties.dtype, /*enabled=*/false);
}

}  // namespace semitone::amp
