#include "semitone/amp/initialize.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/amp/advice.h"
#include "src/amp/initialize_checks.h"
#include "src/amp/initialize_policy.h"
#include "src/amp/memory_format.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/rank.h"
#include "src/amp/small_eps.h"
#include "src/autocast/model_entries.h"
#include "src/core/log.h"
#include "src/core/state_mode.h"
#include "src/scaling/same_memory.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

using Impl = MixedPrecision::Impl;

struct LogCasts : events::Listener {
  using Listener::on;
  void on(const events::Cast& event) override {
    log()->info("{}: {} -> {}, {} elements{}", event.op, dtype_name(event.from),
                dtype_name(event.to), event.numel, event.cached ? " (cached)" : "");
  }
};

// Casts the models' floating tensors in place. Tensors that share memory, also of two models, still
// share it afterwards.
void cast(const std::vector<Model>& models, c10::ScalarType dtype,
          const std::function<bool(const ModelEntry&)>& keep) {
  std::vector<at::Tensor> tensors;
  std::vector<std::size_t> first;  // of those that share their memory with a tensor
  for (const Model& model : models) {
    for (const ModelEntry& entry : entries_of(model)) {
      const at::Tensor& tensor = entry.tensor;
      if (!tensor.is_floating_point() || tensor.scalar_type() == dtype || keep(entry)) continue;
      const auto same =
          std::find_if(tensors.begin(), tensors.end(),
                       [&](const at::Tensor& earlier) { return same_memory(earlier, tensor); });
      first.push_back(static_cast<std::size_t>(same - tensors.begin()));
      tensors.push_back(tensor);
    }
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].set_data(first[i] < i ? tensors[first[i]].variable_data()
                                     : tensors[i].detach().to(dtype));
    if (at::Tensor& grad = tensors[i].mutable_grad(); grad.defined()) grad = grad.to(dtype);
  }
}

// Restores models and optimizers unless initialize succeeded. Masters restore their places
// themselves.
class Undo {
 public:
  Undo(const std::vector<Model>& models, const OptimizerRefs& optimizers)
      : optimizers_(optimizers.begin(), optimizers.end()) {
    for (const Model& model : models) {
      for (const ModelEntry& entry : entries_of(model)) {
        const at::Tensor& tensor = entry.tensor;
        tensors_.push_back({tensor, tensor.variable_data(), tensor.grad()});
      }
    }
    for (torch::optim::Optimizer& optimizer : optimizers) {
      for (const auto& [parameter, state] : optimizer.state()) had_state_.insert(parameter);
    }
  }
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;
  ~Undo() {
    if (!armed_) return;
    for (const Before& before : tensors_) {
      before.tensor.set_data(before.data);
      before.tensor.mutable_grad() = before.grad;
      // The lower half of a split master.
      if (had_state_.count(before.tensor.unsafeGetTensorImpl()) > 0) continue;
      for (torch::optim::Optimizer& optimizer : optimizers_)
        optimizer.state().erase(before.tensor.unsafeGetTensorImpl());
    }
  }
  void disarm() { armed_ = false; }

 private:
  struct Before {
    at::Tensor tensor;
    at::Tensor data;
    at::Tensor grad;
  };
  OptimizerRefs optimizers_;
  std::vector<Before> tensors_;
  std::unordered_set<const void*> had_state_;
  bool armed_ = true;
};

// Error if an argument cannot be used. Finds a tensor of each model on its device.
void check_arguments(Impl& impl, const OptimizerRefs& optimizers) {
  const Properties& properties = impl.properties;
  if (properties.enabled) {
    for (const Model& model : impl.models) check_model(model);
  }
  const bool lowers =
      properties.patch_torch_functions || is_16bit(properties.cast_model_type.value_or(at::kFloat));
  for (const Model& model : impl.models) {
    impl.located.push_back(properties.enabled && lowers ? tensor_on(properties.device, model)
                                                        : at::Tensor());
  }
  check_optimizers(optimizers, properties);
  Impl::require_no_owner(optimizers);
}

// The policy, its region, the scalers and the settings: nothing that changes models or optimizers.
void set_up(Impl& impl) {
  const std::vector<Model>& models = impl.models;
  const Properties& properties = impl.properties;
  impl.policy = policy_for(models, properties);
  for (std::int64_t i = 0; i < properties.num_losses; ++i) {
    impl.scalers.emplace_back(properties.loss_scale_options, i);
  }
  for (std::size_t i = 0; i < models.size(); ++i) {
    impl.names.add(models[i], models.size() == 1 ? "" : "model " + std::to_string(i) + ": ");
  }
  const detail::CudnnSettings& cudnn = properties.cudnn;
  if (properties.enabled && (cudnn.benchmark || cudnn.benchmark_limit || cudnn.workspace_limit))
    impl.cudnn.emplace(cudnn);
  if (properties.verbosity >= 2) impl.cast_log = std::make_shared<LogCasts>();
}

void choose_layout(Impl& impl, const OptimizerRefs& optimizers) {
  std::vector<at::Tensor> weights;
  for (const Model& model : impl.models) {
    const auto more = conv2d_weights(model);
    weights.insert(weights.end(), more.begin(), more.end());
  }
  Properties& properties = impl.properties;
  if (!properties.memory_format.has_value()) {
    const bool is_faster = prefers_channels_last(facts_of(properties.device, impl.models));
    properties.memory_format =
        is_faster ? choose_memory_format(weights, optimizers, properties.opt_level, impl.policy)
                  : c10::MemoryFormat::Preserve;
  }
  if (properties.memory_format != c10::MemoryFormat::Preserve)
    lay_out(weights, *properties.memory_format);
}

// The optimizers' fp32 parameters before they are cast.
Masters::ExactValues exact_values(const OptimizerRefs& optimizers) {
  Masters::ExactValues exact;
  for (torch::optim::Optimizer& optimizer : optimizers) {
    for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
      if (parameter.scalar_type() == at::kFloat)
        exact.emplace(parameter.unsafeGetTensorImpl(), parameter.variable_data());
    });
  }
  return exact;
}

void cast_models(const Impl& impl) {
  cast(impl.models, *impl.properties.cast_model_type, [&](const ModelEntry& entry) {
    return (impl.properties.keep_batchnorm_fp32 && entry.keep_fp32) ||
           (impl.policy.has_value() && entry.is_parameter && impl.policy->keeps_fp32(entry.tensor));
  });
}

// Lists the models' floating-point tensors that are not in 16 bits now.
void list_wide_tensors(Impl& impl) {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const Model& model : impl.models) {
    for (const ModelEntry& entry : entries_of(model)) {
      const at::Tensor& tensor = entry.tensor;
      if (tensor.is_floating_point() && !is_16bit(tensor.scalar_type()) &&
          seen.insert(tensor.unsafeGetTensorImpl()).second)
        impl.wide_tensors.emplace_back(entry.name, tensor);
    }
  }
}

void add_optimizers(Impl& impl, const OptimizerRefs& optimizers,
                    const Masters::ExactValues& exact) {
  for (torch::optim::Optimizer& optimizer : optimizers) {
    auto& record = impl.optimizers.emplace_back();
    record.optimizer = &optimizer;
    if (impl.properties.enabled && impl.properties.master_weights)
      record.masters.emplace(optimizer, exact);
  }
}

std::unique_ptr<Impl> make_impl(const std::vector<Model>& models, const Options& options) {
  auto impl = std::make_unique<Impl>();
  for (const Model& model : models) {
    for (const ModelEntry& entry : entries_of(model))
      impl->inference_tensors = impl->inference_tensors || entry.tensor.is_inference();
  }
  impl->properties = Properties::resolve(options, device_of_models(models));
  impl->models = models;
  impl->ran.resize(models.size());
  impl->warned_of.resize(models.size());
  return impl;
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
  if (models.empty()) throw Error("amp.initialize", "at least one model", "none");
  auto impl = make_impl(models, options);
  // Everything is checked before anything is changed, and changes are undone if something still
  // fails.
  check_arguments(*impl, optimizers);
  set_up(*impl);

  const Properties& properties = impl->properties;
  const StateMode mode(impl->inference_tensors);
  const bool casts = properties.enabled && properties.cast_model_type.has_value();
  const bool makes_masters = casts && properties.master_weights && !optimizers.empty();
  // Without masters only a lack of memory can still cause a failure, which this call would bring
  // about.
  std::optional<Undo> undo;
  if (makes_masters) undo.emplace(models, optimizers);
  const bool chooses_format = !properties.memory_format.has_value();
  if (properties.enabled) choose_layout(*impl, optimizers);
  impl->forward_in_region = runs_in_region(properties, impl->policy, models);
  const Masters::ExactValues exact =
      makes_masters ? exact_values(optimizers) : Masters::ExactValues{};
  if (casts) cast_models(*impl);
  if (properties.enabled) list_wide_tensors(*impl);
  add_optimizers(*impl, optimizers, exact);
  if (properties.enabled) impl->announce_exact_weights();
  if (properties.enabled && properties.verbosity >= 1) {
    if (is_first_rank()) log()->info(properties.to_string());
    warn_of_small_eps(optimizers);
    Properties asked = properties;
    if (chooses_format) asked.memory_format.reset();  // there is nothing better to choose
    log_advice(advice(models, asked, facts_of(properties.device, models)));
  }
  impl->own_optimizers();
  if (undo.has_value()) undo->disarm();
  return MixedPrecision(std::move(impl));
}

}  // namespace semitone::amp
