#include "semitone/amp/mixed_precision.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/amp/memory_format.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/presets/presets.h"
#include "src/amp/rank.h"
#include "src/amp/same_memory.h"
#include "src/amp/small_eps.h"
#include "src/amp/state_mode.h"
#include "src/core/exact_weights.h"
#include "src/core/for_each_module.h"
#include "src/core/log.h"

#include <ATen/EmptyTensor.h>
#include <torch/nn/modules/activation.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
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
    throw Error(kInitialize, "an optimizer that does not evaluate the loss inside its step",
                "LBFGS at " + std::string(name_of(properties.opt_level)),
                "use O0, or a loss scale of 1 without master weights");
  }
}

void check_optimizers(const OptimizerRefs& optimizers, const Properties& properties) {
  std::unordered_set<const torch::optim::Optimizer*> seen;
  std::unordered_set<const c10::TensorImpl*> owned;
  for (torch::optim::Optimizer& optimizer : optimizers) {
    if (!seen.insert(&optimizer).second) {
      throw Error(kInitialize, "each optimizer once", "one of them twice");
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
      throw Error(kInitialize, "each parameter in one optimizer only, with master weights",
                  "one that two optimizers share", "use one optimizer with two groups, or O1");
    }
  }
}

// The device with most of the models' elements.
c10::DeviceType device_of_models(const std::vector<Model>& models) {
  std::map<c10::DeviceType, std::int64_t> elements;
  for (const Model& model : models) {
    for (const Model::Entry& entry : model.entries())
      elements[entry.tensor.device().type()] += entry.tensor.numel();
  }
  const auto most =
      std::max_element(elements.begin(), elements.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == elements.end() ? c10::DeviceType::CPU : most->first;
}

// A tensor of a model on the device that it is prepared for; undefined for a model without tensors.
// Error if it has tensors, but none there: its operators would run without casts.
at::Tensor tensor_on(c10::DeviceType device, const Model& model) {
  const auto entries = model.entries();
  for (const Model::Entry& entry : entries) {
    if (entry.tensor.device().type() == device) return entry.tensor;
  }
  if (entries.empty()) return {};
  const Model::Entry& first = entries.front();
  throw Error(kInitialize,
              "a model on " + c10::DeviceTypeName(device, true) + ", which it is prepared for",
              "'" + first.name + "' on " + first.tensor.device().str(),
              "move the models to their device first, and set Options::device if necessary; call "
              "initialize once per device type");
}

// Whether the models contain LibTorch's attention, whose padding needs a region
// (src/amp/attention_scores.h).
bool has_attention(const std::vector<Model>& models) {
  return std::any_of(models.begin(), models.end(), [](const Model& model) {
    const torch::nn::Module* const whole = model.module();
    if (whole == nullptr) return false;
    const auto is_attention = [](const torch::nn::Module* module) {
      return dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(module) != nullptr;
    };
    const auto parts = whole->modules(/*include_self=*/false);
    return is_attention(whole) || std::any_of(parts.begin(), parts.end(), [&](const auto& part) {
             return is_attention(part.get());
           });
  });
}

// The policy of the region for the models, bound to them; nothing if there is nothing to cast.
std::optional<CastPolicy> policy_for(const std::vector<Model>& models,
                                     const Properties& properties) {
  if (!properties.enabled) return std::nullopt;
  const CastTarget target(properties.device, properties.dtype);
  const CastPolicy given =
      properties.policy.value_or(CastPolicy::semitone(target)).with_target(target);
  if (properties.patch_torch_functions) return given.bind(models);
  const auto& type = properties.cast_model_type;
  if (!type.has_value() || !is_16bit(*type)) return std::nullopt;
  // 16-bit weights: the region emulates what the CPU lacks, casts for parameters that stay fp32,
  // lowers fp32 arguments that meet 16-bit weights, and computes losses in fp32.
  CastPolicy weights_only =
      CastPolicy::none(target).emulation(given.emulation()).fast_kernels(false);
  for (const std::string& op : given.fast_kernels()) weights_only.fast_kernel(op);
  for (const std::string& glob : given.fp32_param_globs()) weights_only.keep_fp32_params(glob);
  // forward() returns fp32, so losses outside of it are in fp32. In autocast()'s region models return
  // 16 bits.
  for (const std::string_view op : presets::losses()) {
    weights_only.keep_fp32(op, presets::reason(CastAction::fp32, op));
  }
  return weights_only.bind(models);
}

// Whether forward must run in that region. forward itself casts the arguments. On devices with
// correct 16-bit operators, the region has work only for parameters that stay fp32, and for
// attention with padded keys, which LibTorch computes in fp32 only.
bool runs_in_region(const Properties& properties, const std::optional<CastPolicy>& policy,
                    const std::vector<Model>& models) {
  return policy.has_value() &&
         (properties.patch_torch_functions || properties.device == c10::DeviceType::CPU ||
          !policy->fp32_param_globs().empty() || has_attention(models));
}

// Only the weights of convolutions are converted: the layers' results follow their format.
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

// Casts a model's floating tensors in place. Tensors that share memory still share it afterwards.
void cast_model(const Model& model, c10::ScalarType dtype,
                const std::function<bool(const Model::Entry&)>& keep) {
  std::vector<at::Tensor> tensors;
  std::vector<std::size_t> first;  // of those that share their memory with a tensor
  for (const Model::Entry& entry : model.entries()) {
    const at::Tensor& tensor = entry.tensor;
    if (!tensor.is_floating_point() || tensor.scalar_type() == dtype || keep(entry)) continue;
    const auto same = std::find_if(tensors.begin(), tensors.end(), [&](const at::Tensor& earlier) {
      return same_memory(earlier, tensor);
    });
    first.push_back(static_cast<std::size_t>(same - tensors.begin()));
    tensors.push_back(tensor);
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
      for (const Model::Entry& entry : model.entries()) {
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

}  // namespace

MixedPrecision::Impl::OptimizerRecord& MixedPrecision::Impl::of(
    const torch::optim::Optimizer& optimizer, const char* caller) {
  for (OptimizerRecord& record : optimizers) {
    if (record.optimizer == &optimizer) return record;
  }
  throw Error(std::string("amp.mixed_precision.") + caller,
              "an optimizer that was given to amp::initialize", "another one",
              "name every optimizer in initialize({model}, {optimizer, …})");
}

const Model& MixedPrecision::Impl::of(const void* identity, const char* caller) const {
  for (const Model& model : models) {
    if (model.identity() == identity) return model;
  }
  throw Error(std::string("amp.mixed_precision.") + caller,
              "a model that was given to amp::initialize", "another one",
              "name every model in initialize({model, …}, {optimizer, …})");
}

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

void MixedPrecision::Impl::require_own_dtypes(const char* caller) const {
  if (fp32_scopes > 0) {
    throw Error(std::string("amp.mixed_precision.") + caller, "a call outside of fp32_weights()",
                "one while the weights are fp32", "end the scope of fp32_weights() first");
  }
}

// Masters as seen by other rooms.
class MixedPrecision::Impl::Exact final : public ExactWeights {
 public:
  explicit Exact(Impl& mixed) : mixed_(&mixed) {}

  at::Tensor value_of(const at::Tensor& parameter) const override {
    if (mixed_ == nullptr) return {};
    mixed_->pull("exact_weights");
    const MasterWeights* const masters = mixed_->masters_of(parameter);
    return masters == nullptr ? at::Tensor() : masters->master_of(parameter);
  }

  void set(const at::Tensor& parameter, const at::Tensor& value) override {
    MasterWeights* const masters = mixed_ == nullptr ? nullptr : mixed_->masters_of(parameter);
    if (masters != nullptr) masters->set(parameter, value);
  }

  void detach() { mixed_ = nullptr; }

 private:
  Impl* mixed_;
};

namespace {

// Finds the MixedPrecision that has an optimizer, among all of the process.
struct Owners {
  std::mutex mutex;
  std::unordered_multimap<const torch::optim::Optimizer*, MixedPrecision::Impl*> by_optimizer;

  // Never destroyed, since a MixedPrecision may be destroyed later.
  static Owners& instance() {
    static auto* const owners = new Owners;
    return *owners;
  }
};

}  // namespace

MixedPrecision::Impl::Impl() = default;

MixedPrecision::Impl::~Impl() {
  {
    Owners& owners = Owners::instance();
    const std::lock_guard lock(owners.mutex);
    std::erase_if(owners.by_optimizer, [this](const auto& entry) { return entry.second == this; });
  }
  if (exact == nullptr) return;
  exact->detach();
  for (const LowTensor& low : low_tensors) withdraw_exact_weight(low.tensor, exact.get());
}

void MixedPrecision::Impl::own_optimizers() {
  Owners& owners = Owners::instance();
  const std::lock_guard lock(owners.mutex);
  for (const OptimizerRecord& record : optimizers)
    owners.by_optimizer.emplace(record.optimizer, this);
}

MixedPrecision::Impl& MixedPrecision::Impl::owner_of(const torch::optim::Optimizer& optimizer,
                                                     const char* caller) {
  Owners& owners = Owners::instance();
  const std::lock_guard lock(owners.mutex);
  const auto [first, last] = owners.by_optimizer.equal_range(&optimizer);
  const auto count = std::distance(first, last);
  if (count == 1) return *first->second;
  throw Error(
      std::string("amp.") + caller, "an optimizer that was given to one amp::initialize",
      count == 0 ? "one that no MixedPrecision has" : "one that " + std::to_string(count) + " have",
      count == 0 ? "call amp::initialize with it before, and keep what that returns"
                 : "call it of the MixedPrecision that is meant");
}

MasterWeights* MixedPrecision::Impl::masters_of(const at::Tensor& parameter) {
  for (OptimizerRecord& record : optimizers) {
    if (record.masters.has_value() && record.masters->has(parameter)) return &*record.masters;
  }
  return nullptr;
}

void MixedPrecision::Impl::take_loaded(const char* caller) {
  // The ratio of its memory to what it needs, 1, 2, 4 …, where more than 1 means a wider dtype. 0:
  // another size.
  const auto times_its_memory = [](const LowTensor& low) -> std::size_t {
    const at::Tensor& tensor = low.tensor;
    if (!tensor.has_storage() || tensor.storage_offset() != 0 || tensor.numel() == 0) return 0;
    if (!is_16bit(tensor.scalar_type()) || tensor.sizes() != low.sizes) return 0;
    const std::size_t bytes = tensor.storage().nbytes();
    const std::size_t own =
        at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
    return bytes % own == 0 ? bytes / own : 0;
  };
  std::vector<std::size_t> loaded;
  for (std::size_t i = 0; i < low_tensors.size(); ++i) {
    const at::Tensor& tensor = low_tensors[i].tensor;
    if (tensor.has_storage() && tensor.storage().nbytes() <= tensor.nbytes()) continue;
    const std::size_t times = times_its_memory(low_tensors[i]);
    if (times == 2 || times == 4) loaded.push_back(i);
  }
  if (loaded.empty()) return;

  const StateMode mode(inference_tensors);
  for (const std::size_t i : loaded) {
    const LowTensor& low = low_tensors[i];
    const c10::StorageImpl* const storage = low.tensor.storage().unsafeGetStorageImpl();
    std::unordered_set<const c10::TensorImpl*> sharing;
    for (const LowTensor& other : low_tensors) {
      if (other.tensor.has_storage() && other.tensor.storage().unsafeGetStorageImpl() == storage)
        sharing.insert(other.tensor.unsafeGetTensorImpl());
    }
    if (low.tensor.storage().use_count() <= sharing.size()) continue;
    throw Error(std::string("amp.mixed_precision.") + caller,
                dtype_name(low.tensor.scalar_type()) + " memory of its own for '" + low.name + "'",
                "shared memory of a wider dtype's size, as torch::load of an fp32 file leaves it",
                "load with mixed.load_model(model, path), or inside mixed.fp32_weights(model)");
  }
  std::vector<std::pair<at::Tensor, at::Tensor>>
      before;  // what was loaded, and the tensor that has it now
  for (const std::size_t i : loaded) {
    const at::Tensor& tensor = low_tensors[i].tensor;
    const bool is_double = times_its_memory(low_tensors[i]) == 4;
    const auto twin = std::find_if(before.begin(), before.end(), [&](const auto& earlier) {
      return same_memory(earlier.first, tensor);
    });
    const at::Tensor loaded_as = tensor.variable_data();
    const at::Tensor value =
        at::empty({0}, tensor.options().dtype(is_double ? at::kDouble : at::kFloat))
            .set_(tensor.storage(), 0, tensor.sizes(), tensor.strides());
    tensor.set_data(twin == before.end() ? value.to(tensor.scalar_type())
                                         : twin->second.variable_data());
    if (MasterWeights* const masters = masters_of(tensor)) masters->set(tensor, value);
    before.emplace_back(loaded_as, tensor);
  }
  if (properties.verbosity >= 1 && is_first_rank()) {
    log()->info(
        "converted fp32 values that torch::load put into {} tensors of the model, the first is "
        "'{}'",
        loaded.size(), low_tensors[loaded.front()].name);
  }
}

void MixedPrecision::Impl::require_dtypes_as_left(const char* caller) const {
  const auto refuse = [caller](const std::string& name, c10::ScalarType left,
                               c10::ScalarType found) {
    throw Error(std::string("amp.mixed_precision.") + caller,
                "'" + name + "' in " + dtype_name(left) + ", as initialize left it",
                dtype_name(found),
                "leave the model's dtypes to amp::initialize: cast a copy, or before it; for fp32 "
                "weights to save or export take mixed.fp32_weights(model)");
  };
  for (const WideTensor& wide : wide_tensors) {
    if (wide.impl.use_count() == 0) continue;
    const auto dtype = c10::typeMetaToScalarType(wide.impl._unsafe_get_target()->dtype());
    if (dtype != at::kFloat) refuse(wide.name, at::kFloat, dtype);
  }
  for (const LowTensor& low : low_tensors) {
    const auto dtype = low.tensor.scalar_type();
    if (dtype != low.dtype && dtype != at::kFloat) refuse(low.name, low.dtype, dtype);
  }
}

void MixedPrecision::Impl::pull(const char* caller) {
  require_own_dtypes(caller);
  find_shared_parameters(caller);
  take_loaded(caller);
  for (OptimizerRecord& record : optimizers) {
    if (record.masters.has_value()) record.masters->pull();
  }
}

void MixedPrecision::Impl::sync(const char* caller) {
  require_own_dtypes(caller);
  require_dtypes_as_left(caller);
  find_shared_parameters(caller);
  take_loaded(caller);
  for (OptimizerRecord& record : optimizers) {
    if (record.masters.has_value()) record.masters->sync();
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
  auto impl = std::make_unique<MixedPrecision::Impl>();
  for (const Model& model : models) {
    for (const Model::Entry& entry : model.entries())
      impl->inference_tensors = impl->inference_tensors || entry.tensor.is_inference();
  }
  impl->properties = Properties::resolve(options, device_of_models(models));
  const Properties& properties = impl->properties;
  impl->models = models;
  impl->ran.resize(models.size());
  impl->warned_of.resize(models.size());

  // Everything is checked before anything is changed, and changes are undone if something still
  // fails.
  if (properties.enabled) {
    for (const Model& model : models) check_model(model);
  }
  const bool lowers =
      properties.patch_torch_functions || is_16bit(properties.cast_model_type.value_or(at::kFloat));
  for (const Model& model : models) {
    impl->located.push_back(properties.enabled && lowers ? tensor_on(properties.device, model)
                                                         : at::Tensor());
  }
  check_optimizers(optimizers, properties);
  impl->policy = policy_for(models, properties);
  impl->forward_in_region = runs_in_region(properties, impl->policy, models);
  for (std::int64_t i = 0; i < properties.num_losses; ++i) {
    impl->scalers.emplace_back(properties.loss_scale_options, i);
  }
  for (std::size_t i = 0; i < models.size(); ++i) {
    impl->names.add(models[i], models.size() == 1 ? "" : "model " + std::to_string(i) + ": ");
  }
  const CudnnSettings& cudnn = properties.cudnn;
  if (cudnn.benchmark || cudnn.benchmark_limit || cudnn.workspace_limit) impl->cudnn.emplace(cudnn);
  if (properties.verbosity >= 2) impl->cast_log = std::make_shared<LogCasts>();

  const StateMode mode(impl->inference_tensors);
  const bool casts = properties.enabled && properties.cast_model_type.has_value();
  const bool makes_masters = casts && properties.master_weights && !optimizers.empty();
  // Without masters only a lack of memory can still cause a failure, which this call would bring
  // about.
  std::optional<Undo> undo;
  if (makes_masters) undo.emplace(models, optimizers);
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
  if (makes_masters) {
    for (torch::optim::Optimizer& optimizer : optimizers) {
      for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
        if (parameter.scalar_type() == at::kFloat)
          exact.emplace(parameter.unsafeGetTensorImpl(), parameter.variable_data());
      });
    }
  }
  if (casts) {
    for (const Model& model : models) {
      cast_model(model, *properties.cast_model_type, [&](const Model::Entry& entry) {
        return (properties.keep_batchnorm_fp32 && entry.keep_fp32) ||
               (impl->policy.has_value() && entry.is_parameter &&
                impl->policy->keeps_fp32(entry.tensor));
      });
    }
  }
  if (properties.enabled) {
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const Model& model : models) {
      for (const Model::Entry& entry : model.entries()) {
        const at::Tensor& tensor = entry.tensor;
        if (!tensor.is_floating_point() || !seen.insert(tensor.unsafeGetTensorImpl()).second)
          continue;
        if (is_16bit(tensor.scalar_type())) {
          impl->low_tensors.push_back(
              {entry.name, tensor, c10::DimVector(tensor.sizes()), tensor.scalar_type()});
        } else {
          impl->wide_tensors.emplace_back(entry.name, tensor);
        }
      }
    }
  }
  for (torch::optim::Optimizer& optimizer : optimizers) {
    auto& record = impl->optimizers.emplace_back();
    record.optimizer = &optimizer;
    if (properties.enabled && properties.master_weights) record.masters.emplace(optimizer, exact);
  }
  if (makes_masters) {
    impl->exact = std::make_shared<MixedPrecision::Impl::Exact>(*impl);
    for (const auto& low : impl->low_tensors) announce_exact_weight(low.tensor, impl->exact);
  }
  if (properties.enabled && properties.verbosity >= 1 && is_first_rank()) {
    log()->info(properties.to_string());
  }
  if (properties.enabled && properties.verbosity >= 1) warn_of_small_eps(optimizers);
  impl->own_optimizers();
  if (undo.has_value()) undo->disarm();
  return MixedPrecision(std::move(impl));
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
  return impl().scaler(loss_id, "loss_scaler");
}

std::int64_t MixedPrecision::skipped_steps() const {
  std::int64_t sum = 0;
  for (const LossScaler& scaler : impl().scalers) sum += scaler.skipped_steps();
  return sum;
}

std::vector<at::Tensor> MixedPrecision::master_params(torch::optim::Optimizer& optimizer) const {
  auto& record = impl().of(optimizer, "master_params");
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

// Running models.

struct MixedPrecision::Region {
  std::optional<events::Listen> log;
  std::optional<Autocast> autocast;
};

std::shared_ptr<MixedPrecision::Region> MixedPrecision::enter(const void* model) const {
  const std::size_t index = impl().model_with(model, "forward");
  impl().require_on_device(index);
  impl().ran[index] = true;
  impl().require_no_step_past("forward");
  impl().sync("forward");
  if (at::GradMode::is_enabled()) impl().hide_gradients(&impl().models[index]);
  auto region = std::make_shared<Region>();
  if (impl().cast_log != nullptr) region->log.emplace(impl().cast_log);
  if (impl().forward_in_region) region->autocast.emplace(*impl().policy);
  return region;
}

std::shared_ptr<MixedPrecision::Region> MixedPrecision::enter_any() const {
  impl().ran_elsewhere = true;
  impl().require_no_step_past("call");
  impl().sync("call");
  if (at::GradMode::is_enabled()) impl().hide_gradients(nullptr);
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
  impl().ran_elsewhere = true;
  if (!impl().policy.has_value())
    return Autocast(properties.device, properties.dtype, /*enabled=*/false);
  if (impl().fp32_scopes == 0) impl().sync("autocast");
  return Autocast(*impl().policy);
}

void MixedPrecision::Impl::warn_of_idle_models(const OptimizerRecord& record) {
  if (ran_elsewhere || !policy.has_value() || properties.verbosity < 1) return;
  if (std::find(ran.begin(), ran.end(), false) == ran.end() || idle_model_checks == 0) return;
  --idle_model_checks;
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (ran[i] || warned_of[i]) continue;
    std::unordered_set<const c10::TensorImpl*> trained;
    record.for_each_leaf([&](const at::Tensor& parameter) {
      const bool has_gradient =
          parameter.grad().defined() ||
          (record.masters.has_value() && record.masters->has_gradient(parameter));
      if (has_gradient) trained.insert(parameter.unsafeGetTensorImpl());
    });
    const auto entries = models[i].entries();
    const bool trains = std::any_of(entries.begin(), entries.end(), [&](const Model::Entry& entry) {
      return trained.count(entry.tensor.unsafeGetTensorImpl()) > 0;
    });
    if (!trains) continue;
    warned_of[i] = true;
    log()->warn(
        "{} is trained, but never ran in mixed precision: call mixed.forward(model, …) instead of "
        "model->forward(…); for other methods use mixed.call(…), or the region mixed.autocast()",
        models.size() == 1 ? "the model" : "model " + std::to_string(i));
  }
}

}  // namespace semitone::amp
