#include "semitone/amp/mixed_precision.h"

#include "semitone/core/dtype.h"
#include "semitone/core/env.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/amp/gradients.h"
#include "src/core/archive.h"
#include "src/core/log.h"

#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace semitone::amp {
namespace {

constexpr auto kInitialize = "amp.initialize";

// One rank of many speaks for all.
bool is_first_rank() {
  return env::get(env::kRank).value_or("0") == "0";
}

struct LogCasts : events::Listener {
  using Listener::on;
  void on(const events::Cast& event) override {
    log()->info("{}: {} -> {}, {} elements{}", event.op, dtype_name(event.from),
                dtype_name(event.to), event.numel, event.cached ? " (cached)" : "");
  }
};

}  // namespace

struct MixedPrecision::Impl {
  struct PerModel {
    Model model;
    std::optional<CastPolicy> policy;  // of the region that forward runs in
  };

  struct PerOptimizer {
    torch::optim::Optimizer* optimizer;
    std::optional<MasterWeights> masters;
    // Gradients from before the current backward, which are not scaled; and the loss whose scaled
    // gradients are held since, by delay_unscale.
    std::unordered_map<const c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>>
        unscaled;  // parameter, gradient
    std::optional<std::int64_t> delayed;
    bool skip = false;
    std::int64_t skipped_by = 0;  // the loss that overflowed
  };

  // A backward whose result the host has not looked at yet.
  struct Pending {
    std::int64_t loss_id;
    std::vector<torch::optim::Optimizer*> optimizers;
    std::vector<at::Tensor> found_inf;
  };

  Properties properties;
  std::vector<PerModel> models;
  std::vector<PerOptimizer> optimizers;
  std::vector<LossScaler> scalers;
  std::vector<Pending> pending;
  ParameterNames names;
  FoundInfHook found_inf_hook;
  std::shared_ptr<events::Listener> cast_log;

  PerOptimizer& of(const torch::optim::Optimizer& optimizer, const char* caller) {
    for (PerOptimizer& known : optimizers) {
      if (known.optimizer == &optimizer) return known;
    }
    throw Error(std::string("amp.mixed_precision.") + caller,
                "an optimizer that was given to amp::initialize", "another one",
                "name every optimizer in initialize({model}, {optimizer, …})");
  }

  PerModel& of(const Model& model, const char* caller) {
    for (PerModel& known : models) {
      if (known.model.is(model)) return known;
    }
    throw Error(std::string("amp.mixed_precision.") + caller,
                "a model that was given to amp::initialize", "another one",
                "name every model in initialize({model, …}, {optimizer, …})");
  }

  LossScaler& scaler(std::int64_t loss_id, const char* caller) {
    if (loss_id < 0 || loss_id >= static_cast<std::int64_t>(scalers.size())) {
      throw Error(std::string("amp.mixed_precision.") + caller,
                  "a loss_id below " + std::to_string(scalers.size()), std::to_string(loss_id),
                  "set Options::num_losses to the number of losses");
    }
    return scalers[static_cast<std::size_t>(loss_id)];
  }

  // Whether gradients of this loss pass through an unscale at all: not in plain training.
  bool is_plain(const LossScaler& loss_scaler,
                const std::vector<torch::optim::Optimizer*>& involved) {
    if (!properties.enabled) return true;
    if (loss_scaler.options().dynamic() || loss_scaler.scale() != 1.0) return false;
    return std::none_of(involved.begin(), involved.end(),
                        [this](torch::optim::Optimizer* optimizer) {
                          return of(*optimizer, "scale_loss").masters.has_value();
                        });
  }

  at::Tensor master_of(const at::Tensor& parameter) {
    for (PerOptimizer& known : optimizers) {
      if (!known.masters.has_value()) continue;
      if (at::Tensor master = known.masters->master_of(parameter); master.defined()) return master;
    }
    return {};
  }

  // Decides, with one host read, what became of the losses that concern this optimizer. Returns
  // found_inf by loss.
  std::map<std::int64_t, bool> resolve(torch::optim::Optimizer& optimizer);
};

// ----------------------------------------------------------------------------------------------------------------
// setting up

namespace {

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
  if (!plain && dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
    throw Error(kInitialize, "an optimizer that takes its gradients as they are",
                "LBFGS at " + std::string(name_of(properties.opt_level)),
                "it evaluates the loss again inside its step: use O0, or a loss scale of 1 without "
                "master weights");
  }
}

// Casts a model's floating tensors in place. Tensors that share their memory go on sharing it.
void cast_model(const Model& model, c10::ScalarType dtype,
                const std::function<bool(const Model::Entry&)>& keep) {
  const at::NoGradGuard no_grad;
  using Place = std::tuple<const void*, std::vector<std::int64_t>, std::vector<std::int64_t>>;
  std::map<Place, at::Tensor> cast;
  for (const Model::Entry& entry : model.entries()) {
    at::Tensor tensor = entry.tensor;
    if (!tensor.is_floating_point() || tensor.scalar_type() == dtype || keep(entry)) continue;
    const Place place{tensor.numel() == 0 ? tensor.unsafeGetTensorImpl() : tensor.const_data_ptr(),
                      tensor.sizes().vec(), tensor.strides().vec()};
    const auto [known, is_new] = cast.try_emplace(place);
    if (is_new) known->second = tensor.detach().to(dtype);
    tensor.set_data(known->second);
    if (at::Tensor& grad = tensor.mutable_grad(); grad.defined()) grad = grad.to(dtype);
  }
}

}  // namespace

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
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    for (std::size_t k = 0; k < i; ++k) {
      if (&optimizers[i].get() == &optimizers[k].get())
        throw Error(kInitialize, "every optimizer once", "one of them twice");
    }
  }
  if (properties.enabled) {
    for (const Model& model : models) check_model(model);
    for (const auto& optimizer : optimizers) check_optimizer(optimizer.get(), properties);
    if (properties.verbosity >= 1 && is_first_rank()) log()->info(properties.to_string());
  }

  // Policies are bound before anything is changed: a glob that matches nothing is an error.
  const CastTarget target(properties.device, properties.dtype);
  const CastPolicy given =
      properties.policy.value_or(CastPolicy::semitone(target)).with_target(target);
  const bool casts_model = properties.enabled && properties.cast_model_type.has_value();
  for (const Model& model : models) {
    MixedPrecision::Impl::PerModel& known =
        impl->models.emplace_back(MixedPrecision::Impl::PerModel{model, std::nullopt});
    if (!properties.enabled) continue;
    if (properties.patch_torch_functions) {
      known.policy = given.bind(model);
    } else if (casts_model && is_16bit(*properties.cast_model_type)) {
      CastPolicy weights_only = CastPolicy::none(target).emulation(given.emulation());
      for (const std::string& glob : given.fp32_param_globs()) weights_only.keep_fp32_params(glob);
      // Elsewhere LibTorch computes 16-bit operators as they should be.
      if (properties.device == c10::DeviceType::CPU || !given.fp32_param_globs().empty()) {
        known.policy = weights_only.bind(model);
      }
    }
  }

  MasterWeights::ExactValues exact;
  if (casts_model) {
    if (properties.master_weights) {
      for (const auto& optimizer : optimizers) {
        for_each_parameter(optimizer.get(),
                           [&](std::size_t, std::size_t, const at::Tensor& parameter) {
                             exact.emplace(parameter.unsafeGetTensorImpl(), parameter.detach());
                           });
      }
    }
    for (const auto& known : impl->models) {
      cast_model(known.model, *properties.cast_model_type, [&](const Model::Entry& entry) {
        return (properties.keep_batchnorm_fp32 && entry.keep_fp32) ||
               (known.policy.has_value() && entry.is_parameter &&
                known.policy->keeps_fp32(entry.tensor));
      });
    }
  }
  for (const auto& optimizer : optimizers) {
    auto& known = impl->optimizers.emplace_back();
    known.optimizer = &optimizer.get();
    if (properties.enabled && properties.master_weights)
      known.masters.emplace(optimizer.get(), exact);
  }
  for (std::int64_t i = 0; i < properties.num_losses; ++i)
    impl->scalers.emplace_back(properties.loss_scale_options, i);
  for (std::size_t i = 0; i < models.size(); ++i) {
    const std::string prefix = models.size() == 1 ? "" : "model " + std::to_string(i) + ": ";
    for (const Model::Entry& entry : models[i].entries()) {
      if (!entry.is_parameter) continue;
      impl->names.add(entry.tensor, prefix + entry.name);
      if (const at::Tensor master = impl->master_of(entry.tensor); master.defined())
        impl->names.add(master, prefix + entry.name);
    }
  }
  if (properties.verbosity >= 2) impl->cast_log = std::make_shared<LogCasts>();
  return MixedPrecision(std::move(impl));
}

MixedPrecision::MixedPrecision(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MixedPrecision::MixedPrecision(MixedPrecision&&) noexcept = default;
MixedPrecision& MixedPrecision::operator=(MixedPrecision&&) noexcept = default;
MixedPrecision::~MixedPrecision() = default;

const Properties& MixedPrecision::properties() const {
  return impl_->properties;
}

// -------------------------------------------------------------------------------------------------------------------
// forward

struct MixedPrecision::Region {
  std::optional<events::Listen> log;
  std::optional<Autocast> autocast;
};

std::shared_ptr<MixedPrecision::Region> MixedPrecision::enter(const void* model) const {
  auto region = std::make_shared<Region>();
  const auto known = std::find_if(
      impl_->models.begin(), impl_->models.end(),
      [model](const Impl::PerModel& candidate) { return candidate.model.identity() == model; });
  if (known == impl_->models.end()) {
    throw Error("amp.mixed_precision.forward", "a model that was given to amp::initialize",
                "another one", "name every model in initialize({model, …}, {optimizer, …})");
  }
  for (auto& optimizer : impl_->optimizers) {
    if (optimizer.masters.has_value()) optimizer.masters->sync();
  }
  if (impl_->cast_log != nullptr) region->log.emplace(impl_->cast_log);
  if (known->policy.has_value()) region->autocast.emplace(*known->policy);
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
  if (properties.enabled && properties.patch_torch_functions)
    return Autocast(*impl_->models.front().policy);
  return Autocast(properties.device, properties.dtype, /*enabled=*/false);
}

// ------------------------------------------------------------------------------------------------------------------
// backward

struct ScaledLoss::Work {
  MixedPrecision::Impl* mixed;
  std::int64_t loss_id;
  bool delay;
  std::vector<torch::optim::Optimizer*> optimizers;

  using PerOptimizer = MixedPrecision::Impl::PerOptimizer;

  template <typename Visit>
  void for_each(Visit&& visit) {
    for (torch::optim::Optimizer* optimizer : optimizers)
      visit(mixed->of(*optimizer, "scale_loss"));
  }

  // Sets earlier gradients aside, so that those of this backward stay apart: they are scaled, the
  // earlier ones are not.
  void begin() {
    for_each([](PerOptimizer& known) {
      if (known.delayed.has_value()) return;  // what is there is scaled alike
      if (known.masters.has_value()) {
        known.masters->sync();
        // Gradients that were back-propagated without a scale, by hand.
        Gradients by_hand(1.0F);
        bool any = false;
        known.masters->for_each([&](at::Tensor& parameter, at::Tensor& master) {
          any = any || parameter.grad().defined();
          by_hand.move(parameter, master);
        });
        std::vector<at::Tensor> ignored;
        if (any) by_hand.run(ignored);
      }
      for_each_parameter(*known.optimizer, [&](std::size_t, std::size_t, at::Tensor& parameter) {
        const bool is_master = known.masters.has_value() && known.masters->is_master(parameter);
        if (is_master || !parameter.grad().defined()) return;
        known.unscaled.emplace(parameter.unsafeGetTensorImpl(),
                               std::pair(parameter, parameter.grad()));
        parameter.mutable_grad().reset();
      });
    });
  }

  void finish() {
    if (delay) {
      for_each([this](PerOptimizer& known) { known.delayed = loss_id; });
      return;
    }
    Gradients gradients(mixed->scaler(loss_id, "scale_loss").inverse());
    for_each([&](PerOptimizer& known) {
      if (known.masters.has_value()) {
        known.masters->for_each(
            [&](at::Tensor& parameter, at::Tensor& master) { gradients.move(parameter, master); });
      }
      for_each_parameter(*known.optimizer, [&](std::size_t, std::size_t, at::Tensor& parameter) {
        const auto earlier = known.unscaled.find(parameter.unsafeGetTensorImpl());
        gradients.unscale(parameter,
                          earlier == known.unscaled.end() ? at::Tensor() : earlier->second.second);
      });
      known.unscaled.clear();
      known.delayed.reset();
    });
    MixedPrecision::Impl::Pending result{loss_id, optimizers, {}};
    gradients.run(result.found_inf);
    mixed->pending.push_back(std::move(result));
  }

  void put_back() noexcept {
    for_each([](PerOptimizer& known) {
      if (known.masters.has_value()) {
        known.masters->for_each(
            [](at::Tensor& parameter, at::Tensor&) { parameter.mutable_grad().reset(); });
      }
      for_each_parameter(*known.optimizer, [&](std::size_t, std::size_t, at::Tensor& parameter) {
        if (!known.masters.has_value() || !known.masters->is_master(parameter))
          parameter.mutable_grad().reset();
      });
      for (auto& [impl, earlier] : known.unscaled) earlier.first.mutable_grad() = earlier.second;
      known.unscaled.clear();
      known.delayed.reset();
    });
  }
};

ScaledLoss::ScaledLoss(at::Tensor scaled, std::unique_ptr<Work> work)
    : scaled_(std::move(scaled)), work_(std::move(work)) {
  if (work_ != nullptr) work_->begin();
}

ScaledLoss::ScaledLoss(ScaledLoss&& other) noexcept = default;

ScaledLoss::~ScaledLoss() {
  if (work_ != nullptr) work_->put_back();
}

void ScaledLoss::backward(const at::Tensor& gradient, bool retain_graph, bool create_graph) {
  scaled_.backward(gradient, retain_graph, create_graph);
  finish();
}

void ScaledLoss::finish() {
  if (work_ == nullptr) return;
  work_->finish();
  work_.reset();
}

ScaledLoss MixedPrecision::scale_loss(const at::Tensor& loss, torch::optim::Optimizer& optimizer,
                                      ScaleLossOptions options) {
  return scale_loss(loss, OptimizerRefs{optimizer}, options);
}

ScaledLoss MixedPrecision::scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers,
                                      ScaleLossOptions options) {
  constexpr auto kCaller = "scale_loss";
  const LossScaler& scaler = impl_->scaler(options.loss_id, kCaller);
  std::vector<torch::optim::Optimizer*> involved;
  for (const auto& optimizer : optimizers) {
    const auto& known = impl_->of(optimizer.get(), kCaller);
    if (known.delayed.has_value() && *known.delayed != options.loss_id) {
      throw Error("amp.mixed_precision.scale_loss",
                  "loss_id " + std::to_string(*known.delayed) +
                      ", whose gradients the optimizer holds scaled",
                  std::to_string(options.loss_id),
                  "finish the delayed loss first: call it once with delay_unscale = false");
    }
    involved.push_back(known.optimizer);
  }
  if (impl_->is_plain(scaler, involved)) {
    return ScaledLoss(impl_->properties.enabled ? cast_floating(loss, at::kFloat) : loss, nullptr);
  }
  at::Tensor scaled = scaler.scaled(loss);
  return ScaledLoss(std::move(scaled),
                    std::make_unique<ScaledLoss::Work>(ScaledLoss::Work{
                        impl_.get(), options.loss_id, options.delay_unscale, std::move(involved)}));
}

// ----------------------------------------------------------------------------------------------------------------------
// step

std::map<std::int64_t, bool> MixedPrecision::Impl::resolve(torch::optim::Optimizer& optimizer) {
  std::vector<Pending> now;
  const auto concerns = [&](const Pending& candidate) {
    return std::find(candidate.optimizers.begin(), candidate.optimizers.end(), &optimizer) !=
           candidate.optimizers.end();
  };
  for (Pending& candidate : pending) {
    if (concerns(candidate)) now.push_back(std::move(candidate));
  }
  pending.erase(
      std::remove_if(pending.begin(), pending.end(),
                     [](const Pending& candidate) { return candidate.optimizers.empty(); }),
      pending.end());

  std::map<std::int64_t, bool> found_by_loss;
  for (Pending& result : now) {
    if (found_inf_hook) {
      // Every rank must take part, also one whose loss gave no gradients this time.
      if (result.found_inf.empty()) found_inf_on(result.found_inf, device_of(optimizer));
      for (at::Tensor& flag : result.found_inf) found_inf_hook(flag);
    }
  }
  // One read for all losses: their flags are stacked on the device.
  std::map<c10::Device, std::vector<at::Tensor>, bool (*)(c10::Device, c10::Device)> by_device(
      [](c10::Device a, c10::Device b) { return a.str() < b.str(); });
  for (const Pending& result : now) {
    for (const at::Tensor& flag : result.found_inf) by_device[flag.device()].push_back(flag);
  }
  std::map<c10::Device, std::pair<at::Tensor, std::int64_t>, bool (*)(c10::Device, c10::Device)>
      read(by_device.key_comp());
  for (const auto& [device, flags] : by_device)
    read.emplace(device, std::pair(at::stack(flags).cpu(), 0));
  for (const Pending& result : now) {
    bool found = false;
    for (const at::Tensor& flag : result.found_inf) {
      auto& [values, next] = read.at(flag.device());
      found = values.const_data_ptr<float>()[next++] != 0 || found;
    }
    bool& of_loss = found_by_loss[result.loss_id];
    of_loss = of_loss || found;
    if (!found) continue;
    for (torch::optim::Optimizer* involved : result.optimizers) {
      PerOptimizer& known = of(*involved, "step");
      known.skip = true;
      known.skipped_by = result.loss_id;
    }
  }
  return found_by_loss;
}

Step MixedPrecision::step(torch::optim::Optimizer& optimizer) {
  Impl::PerOptimizer& known = impl_->of(optimizer, "step");
  if (!impl_->properties.enabled) {
    optimizer.step();
    return Step::stepped;
  }
  if (known.delayed.has_value()) {
    throw Error("amp.mixed_precision.step", "gradients that are unscaled",
                "scaled ones: the last scale_loss had delay_unscale = true",
                "call the last backward of an iteration without it");
  }
  if (known.masters.has_value()) known.masters->sync();
  const auto found_by_loss = impl_->resolve(optimizer);
  const bool skip = std::exchange(known.skip, false);
  if (skip) {
    LossScaler& scaler = impl_->scaler(known.skipped_by, "step");
    const bool say = impl_->properties.verbosity >= 1 && is_first_rank();
    const Overflow overflow =
        scaler.wants_names() || say ? find_overflow(optimizer, impl_->names) : Overflow{};
    if (say) {
      log()->info(
          "skipped a step: inf or NaN in {} gradients, nearest the loss that of '{}' (loss {}, "
          "scale {})",
          overflow.parameters, overflow.parameter, known.skipped_by, scaler.scale());
    }
    scaler.note_skip(overflow);
  } else {
    optimizer.step();
    if (known.masters.has_value()) known.masters->write_model();
  }
  if (known.masters.has_value()) known.masters->clear_gradients();
  for (const auto& [loss_id, found] : found_by_loss) impl_->scaler(loss_id, "step").update(found);
  return skip ? Step::skipped : Step::stepped;
}

std::vector<at::Tensor> MixedPrecision::master_params(torch::optim::Optimizer& optimizer) const {
  impl_->of(optimizer, "master_params");
  std::vector<at::Tensor> parameters;
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    parameters.push_back(parameter);
  });
  return parameters;
}

void MixedPrecision::zero_grad(torch::optim::Optimizer& optimizer) {
  Impl::PerOptimizer& known = impl_->of(optimizer, "zero_grad");
  optimizer.zero_grad();
  if (known.masters.has_value()) {
    known.masters->for_each(
        [](at::Tensor& parameter, at::Tensor&) { parameter.mutable_grad().reset(); });
  }
  known.unscaled.clear();
  known.delayed.reset();
}

const LossScaler& MixedPrecision::loss_scaler(std::int64_t loss_id) const {
  return impl_->scaler(loss_id, "loss_scaler");
}

std::int64_t MixedPrecision::skipped_steps() const {
  std::int64_t sum = 0;
  for (const LossScaler& scaler : impl_->scalers) sum += scaler.skipped_steps();
  return sum;
}

void MixedPrecision::set_found_inf_hook(FoundInfHook hook) {
  impl_->found_inf_hook = std::move(hook);
}

// -----------------------------------------------------------------------------------------------------------
// saving, loading

struct MixedPrecision::Fp32Weights::Saved {
  struct Item {
    std::string name;
    at::Tensor tensor;       // of the model
    at::Tensor low;          // its 16-bit memory
    MasterWeights* masters;  // where its fp32 value belongs; null where it has no master
  };
  std::vector<Item> items;
};

MixedPrecision::Fp32Weights::Fp32Weights(std::unique_ptr<Saved> saved) : saved_(std::move(saved)) {}
MixedPrecision::Fp32Weights::Fp32Weights(Fp32Weights&&) noexcept = default;

MixedPrecision::Fp32Weights::~Fp32Weights() {
  try {
    end();
  } catch (const std::exception& error) {
    log()->error(error.what());
  }
}

void MixedPrecision::Fp32Weights::end() {
  if (saved_ == nullptr) return;
  const at::NoGradGuard no_grad;
  const auto saved = std::move(saved_);
  std::string misfit;
  for (Saved::Item& item : saved->items) {
    const at::Tensor value = item.tensor.detach();
    item.tensor.set_data(item.low);
    if (value.sizes() != item.low.sizes()) {
      misfit = c10::str(value.sizes(), " for '", item.name, "' of shape ", item.low.sizes());
    } else if (item.masters != nullptr) {
      item.masters->set(item.tensor, value);
    } else {
      item.tensor.copy_(value);
    }
  }
  if (!misfit.empty()) {
    throw Error("amp.mixed_precision.fp32_weights", "weights of the model's shapes", misfit,
                "the others were taken over");
  }
}

MixedPrecision::Fp32Weights MixedPrecision::fp32_weights(const Model& model) {
  const at::NoGradGuard no_grad;
  auto saved = std::make_unique<Fp32Weights::Saved>();
  Impl::PerModel& known = impl_->of(model, "fp32_weights");
  for (auto& optimizer : impl_->optimizers) {
    if (optimizer.masters.has_value()) optimizer.masters->sync();
  }
  std::unordered_map<const c10::TensorImpl*, bool> done;
  for (const Model::Entry& entry : known.model.entries()) {
    if (!is_16bit(entry.tensor.scalar_type()) ||
        !done.emplace(entry.tensor.unsafeGetTensorImpl(), true).second)
      continue;
    MasterWeights* masters = nullptr;
    at::Tensor value;
    for (auto& optimizer : impl_->optimizers) {
      if (!optimizer.masters.has_value()) continue;
      value = optimizer.masters->master_of(entry.tensor);
      if (value.defined()) {
        masters = &*optimizer.masters;
        break;
      }
    }
    at::Tensor tensor = entry.tensor;
    saved->items.push_back({entry.name, tensor, tensor.detach(), masters});
    tensor.set_data(value.defined() ? value.detach() : tensor.detach().to(at::kFloat));
  }
  return Fp32Weights(std::move(saved));
}

void MixedPrecision::save(torch::serialize::OutputArchive& archive) const {
  if (!impl_->pending.empty()) {
    throw Error("amp.mixed_precision.save", "a call between two iterations",
                "one between scale_loss and step", "save after step()");
  }
  const Properties& properties = impl_->properties;
  archive.write("opt_level", c10::IValue(std::string(name_of(properties.opt_level))));
  archive.write("dtype", c10::IValue(dtype_name(properties.dtype)));
  archive.write("losses", c10::IValue(static_cast<std::int64_t>(impl_->scalers.size())));
  archive.write("optimizers", c10::IValue(static_cast<std::int64_t>(impl_->optimizers.size())));
  for (std::size_t i = 0; i < impl_->scalers.size(); ++i) {
    torch::serialize::OutputArchive scaler;
    impl_->scalers[i].save(scaler);
    archive.write("loss" + std::to_string(i), scaler);
  }
  for (std::size_t i = 0; i < impl_->optimizers.size(); ++i) {
    if (!impl_->optimizers[i].masters.has_value()) continue;
    torch::serialize::OutputArchive masters;
    impl_->optimizers[i].masters->save(masters);
    archive.write("masters" + std::to_string(i), masters);
  }
}

void MixedPrecision::load(torch::serialize::InputArchive& archive) {
  constexpr auto kWhere = "amp.mixed_precision.load";
  const Properties& properties = impl_->properties;
  const auto must_be = [&](const std::string& what, const std::string& here,
                           const std::string& saved) {
    if (here != saved)
      throw FileError(kWhere, what + " " + here, saved, "initialize as the saved run did");
  };
  must_be("opt level", std::string(name_of(properties.opt_level)),
          read_value<std::string>(archive, "opt_level", kWhere));
  if (properties.cast_model_type.has_value() || properties.patch_torch_functions) {
    must_be("dtype", dtype_name(properties.dtype),
            read_value<std::string>(archive, "dtype", kWhere));
  }
  must_be("number of losses", std::to_string(impl_->scalers.size()),
          std::to_string(read_value<std::int64_t>(archive, "losses", kWhere)));
  must_be("number of optimizers", std::to_string(impl_->optimizers.size()),
          std::to_string(read_value<std::int64_t>(archive, "optimizers", kWhere)));
  const auto part = [&](const std::string& key) {
    torch::serialize::InputArchive inner;
    if (!archive.try_read(key, inner))
      throw FileError(kWhere, "'" + key + "' in the archive", "none", "is the file complete?");
    return inner;
  };
  std::vector<LossScaler> scalers = impl_->scalers;
  for (std::size_t i = 0; i < scalers.size(); ++i) {
    auto inner = part("loss" + std::to_string(i));
    scalers[i].load(inner);
  }
  for (std::size_t i = 0; i < impl_->optimizers.size(); ++i) {
    if (!impl_->optimizers[i].masters.has_value()) continue;
    auto inner = part("masters" + std::to_string(i));
    impl_->optimizers[i].masters->load(inner);
  }
  impl_->scalers = std::move(scalers);
  impl_->pending.clear();
  for (auto& known : impl_->optimizers) known.skip = false;
}

namespace {

void copy_by_name(const Model& to, const torch::jit::Module& from) {
  const at::NoGradGuard no_grad;
  std::unordered_map<std::string, at::Tensor> values;
  for (const Model::Entry& entry : Model(from).entries()) values.emplace(entry.name, entry.tensor);
  for (const Model::Entry& entry : to.entries()) {
    const auto value = values.find(entry.name);
    if (value == values.end()) {
      throw FileError("amp.mixed_precision.load_model", "a value for '" + entry.name + "'", "none");
    }
    at::Tensor(entry.tensor).set_data(value->second.detach());
  }
}

}  // namespace

void MixedPrecision::save_model(const Model& model, const std::string& path) {
  const auto fp32 = fp32_weights(model);
  const std::string partial = path + ".partial";
  try {
    if (const auto* script = model.script()) {
      script->save(partial);
    } else {
      torch::serialize::OutputArchive archive;
      model.module()->save(archive);
      archive.save_to(partial);
    }
    std::filesystem::rename(partial, path);
  } catch (const std::exception& error) {
    std::remove(partial.c_str());
    throw FileError("amp.mixed_precision.save_model", "to write '" + path + "'", error.what(),
                    "nothing was changed");
  }
}

void MixedPrecision::load_model(const Model& model, const std::string& path) {
  auto fp32 = fp32_weights(model);
  try {
    if (model.script() != nullptr) {
      copy_by_name(model, torch::jit::load(path));
    } else {
      torch::serialize::InputArchive archive;
      archive.load_from(path);
      model.module()->load(archive);
    }
  } catch (const FileError&) {
    throw;
  } catch (const std::exception& error) {
    throw FileError("amp.mixed_precision.load_model", "a saved model in '" + path + "'",
                    error.what(), "");
  }
  fp32.end();
}

}  // namespace semitone::amp
