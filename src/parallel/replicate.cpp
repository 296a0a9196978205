#include "semitone/core/error.h"
#include "semitone/core/map_tensors.h"
#include "semitone/parallel/detail/replicas.h"
#include "src/core/replica_parameters.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace semitone::parallel::detail {
namespace {

constexpr auto kReplicate = "parallel.data_parallel";

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Makes copies of a parameter's values results of the parameter in autograd. Their gradients are
// added in the order of the replicas, whichever arrives first.
struct Replicate : public torch::autograd::Function<Replicate> {
  static variable_list forward(AutogradContext* context, const at::Tensor& parameter,
                               at::TensorList copies) {
    context->set_materialize_grads(false);
    context->saved_data["device"] = parameter.device();
    context->mark_dirty(copies.vec());
    return copies.vec();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const c10::Device device = context->saved_data["device"].toDevice();
    at::Tensor sum;
    for (const at::Tensor& gradient : gradients) {
      if (!gradient.defined()) continue;
      const at::Tensor here = gradient.to(device);
      sum = sum.defined() ? sum + here : here;
    }
    variable_list result(1 + gradients.size());  // copies get none
    result.front() = sum;
    return result;
  }
};

// Modules initialize their copies before these get the values, which draws random numbers that a
// program with one device does not draw.
class KeepRandomState {
 public:
  KeepRandomState() : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~KeepRandomState() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }
  KeepRandomState(const KeepRandomState&) = delete;
  KeepRandomState& operator=(const KeepRandomState&) = delete;

 private:
  at::Generator generator_;
  at::Tensor state_;
};

void require_on(const ModelTensors& model, c10::Device device) {
  for (const auto* entries : {&model.parameters, &model.buffers}) {
    for (const auto& entry : *entries) {
      if (entry.tensor.device() == device) continue;
      throw Error(kReplicate, c10::str("the whole model on the first device, ", device),
                  c10::str("'", entry.name, "' on ", entry.tensor.device()),
                  "move the model before DataParallel is constructed");
    }
  }
}

// The copy of one parameter in every replica.
void connect(const at::Tensor& parameter, const variable_list& copies,
             ReplicaParameters& parameters) {
  for (const at::Tensor& copy : copies)
    parameters.originals[copy.unsafeGetTensorImpl()] = original_of(parameter);
  const bool trained = parameter.requires_grad();
  for (const at::Tensor& copy : copies) copy.requires_grad_(trained && !at::GradMode::is_enabled());
  if (trained && at::GradMode::is_enabled()) Replicate::apply(parameter, at::TensorList(copies));
}

std::shared_ptr<torch::nn::Module> clone(const torch::nn::Module& model, c10::Device device) {
  try {
    return model.clone(device);
  } catch (const c10::Error& error) {
    throw Error(kReplicate, "a model that can be cloned", error.what_without_backtrace(),
                "derive it from torch::nn::Cloneable, and make its layers in reset()");
  }
}

template <typename... Layers>
at::Tensor weight_of_any(const torch::nn::Module& layer) {
  at::Tensor weight;
  const auto look = [&](const auto* one) {
    if (one != nullptr) weight = one->weight;
  };
  (look(layer.as<Layers>()), ...);
  return weight;
}

// The weight that a layer computes with. Undefined for layers whose weights programs do not tie.
at::Tensor weight_of(const torch::nn::Module& layer) {
  namespace nn = torch::nn;
  return weight_of_any<nn::Linear, nn::Embedding, nn::EmbeddingBag, nn::Conv1d, nn::Conv2d,
                       nn::Conv3d, nn::ConvTranspose1d, nn::ConvTranspose2d, nn::ConvTranspose3d>(
      layer);
}

// Error if a layer computes with another layer's parameter, and its copy does not: clone() copies
// what is registered, and `decoder->weight = embed->weight` changes a member only. A weight that is
// no parameter is not compared: a forward that computes it does so in the copy, too.
void require_same_weights(const torch::nn::Module& model, const torch::nn::Module& replica) {
  const auto parameters = model.named_parameters();
  const auto copies = replica.named_parameters();
  const auto layers_of_copy = replica.named_modules("", /*include_self=*/false);
  for (const auto& layer : model.named_modules("", /*include_self=*/false)) {
    const at::Tensor weight = weight_of(*layer.value());
    const at::Tensor* const own = parameters.find(layer.key() + ".weight");
    if (!weight.defined() || (own != nullptr && weight.is_same(*own))) continue;
    const auto* const copy = layers_of_copy.find(layer.key());
    const at::Tensor weight_of_copy = copy == nullptr ? at::Tensor() : weight_of(**copy);
    for (const auto& parameter : parameters) {
      if (!parameter.value().is_same(weight)) continue;
      const at::Tensor* const copied = copies.find(parameter.key());
      if (copied != nullptr && copied->is_same(weight_of_copy)) break;
      throw Error(kReplicate, "layers that compute with weights of their own",
                  c10::str("'", layer.key(), "' with '", parameter.key(),
                           "', which its copies would not do"),
                  "share the weight in forward: torch::linear(x, embed->weight)");
    }
  }
}

// Copies the tensors of a TorchScript module and their owners; the code is shared.
class ScriptCopier {
 public:
  explicit ScriptCopier(c10::Device device) : device_(device) {}

  c10::IValue copy(const c10::IValue& value) {
    if (!value.isObject()) {
      return map_tensors(value, [this](const at::Tensor& tensor) { return copy(tensor); });
    }
    const auto object = value.toObject();
    const auto [known, added] = objects_.try_emplace(object.get());
    if (!added) return known->second;
    const auto result = object->copy();
    known->second = result;
    for (std::size_t slot = 0; slot < object->slots().size(); ++slot)
      result->setSlot(slot, copy(object->getSlot(slot)));
    return result;
  }

  // Undefined for a tensor that has not been found yet.
  at::Tensor copy_of(const at::Tensor& tensor) const {
    const auto known = tensors_.find(tensor.unsafeGetTensorImpl());
    return known == tensors_.end() ? at::Tensor() : known->second;
  }

 private:
  at::Tensor copy(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    at::Tensor& known = tensors_[tensor.unsafeGetTensorImpl()];
    if (!known.defined()) {
      known = tensor.detach().to(tensor.options().device(device_), /*non_blocking=*/false,
                                 /*copy=*/true);
    }
    return known;
  }

  c10::Device device_;
  std::unordered_map<const c10::ivalue::Object*, c10::intrusive_ptr<c10::ivalue::Object>> objects_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> tensors_;
};

}  // namespace

Replicas<std::shared_ptr<torch::nn::Module>> replicate(const torch::nn::Module& model,
                                                       const ReplicaPlan& plan, std::size_t count) {
  const auto parameters = std::make_shared<ReplicaParameters>();
  std::vector<std::shared_ptr<torch::nn::Module>> replicas;
  if (count <= 1) return {replicas, parameters};
  require_on(tensors_of(model), plan.devices.front());
  {
    const KeepRandomState keep;
    for (std::size_t i = 1; i < count; ++i) replicas.push_back(clone(model, plan.devices[i]));
  }
  require_same_weights(model, *replicas.front());
  std::vector<torch::OrderedDict<std::string, at::Tensor>> copies;
  copies.reserve(replicas.size());
  for (const auto& replica : replicas) copies.push_back(replica->named_parameters());
  // A parameter that is registered in two places may have one copy or two.
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& parameter : model.named_parameters()) {
    variable_list fresh;
    for (const auto& copy : copies) {
      const at::Tensor* const found = copy.find(parameter.key());
      if (found == nullptr) {
        throw Error(kReplicate, "clones with the model's parameters",
                    "one without '" + parameter.key() + "'");
      }
      if (found->is_same(parameter.value())) {
        throw Error(kReplicate, "clones with parameters of their own",
                    "one that shares '" + parameter.key() + "'", "clone() has to copy them");
      }
      if (seen.insert(found->unsafeGetTensorImpl()).second) fresh.push_back(*found);
    }
    if (!fresh.empty()) connect(parameter.value(), fresh, *parameters);
  }
  return {std::move(replicas), parameters};
}

Replicas<torch::jit::Module> replicate(const torch::jit::Module& model, const ReplicaPlan& plan,
                                       std::size_t count) {
  const auto parameters = std::make_shared<ReplicaParameters>();
  std::vector<torch::jit::Module> replicas;
  if (count <= 1) return {replicas, parameters};
  const ModelTensors tensors = tensors_of(model);
  require_on(tensors, plan.devices.front());
  std::vector<ScriptCopier> copiers;
  for (std::size_t i = 1; i < count; ++i) {
    ScriptCopier& copier = copiers.emplace_back(plan.devices[i]);
    replicas.emplace_back(copier.copy(model._ivalue()).toObject());
  }
  for (const auto& entry : tensors.parameters) {
    variable_list copies;
    for (const ScriptCopier& copier : copiers) copies.push_back(copier.copy_of(entry.tensor));
    connect(entry.tensor, copies, *parameters);
  }
  return {std::move(replicas), parameters};
}

}  // namespace semitone::parallel::detail
