#include "src/scaling/gradient_events.h"

#include "semitone/core/dtype.h"
#include "semitone/core/events.h"
#include "semitone/optim/fused_optimizer.h"
#include "src/scaling/gradients.h"
#include "src/scaling/masters.h"

#include <torch/types.h>

#include <cmath>
#include <cstddef>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace semitone::amp {
namespace {

using ByTensor = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

// The tensor of a table, or an undefined one.
at::Tensor find_in(const ByTensor& table, const at::Tensor& key) {
  const auto found = table.find(key.unsafeGetTensorImpl());
  return found == table.end() ? at::Tensor() : found->second;
}

// A gradient that is multiplied by a scale, as the deferred ones of the same event are.
at::Tensor scaled_like_deferred(const at::Tensor& grad, double scale) {
  if (!grad.defined() || scale == 1) return grad;
  return (is_16bit(grad.scalar_type()) ? grad.to(at::kFloat) : grad).mul(scale);
}

// What the parameters of an optimizer stand for. Without masters both tables are empty.
struct Origins {
  explicit Origins(Masters* masters) {
    if (masters == nullptr) return;
    masters->for_each([this](const at::Tensor& parameter, const at::Tensor& master) {
      of_model.emplace(master.unsafeGetTensorImpl(), parameter);
    });
    Masters::Deferred found = masters->deferred_gradients();
    if (found.grads.empty()) return;
    scale = 1 / double{found.inverse_scale};
    if (!std::isfinite(static_cast<float>(scale))) {  // they were clipped to zero
      masters->move_deferred_gradients();
      scale = 1;
      return;
    }
    for (std::size_t i = 0; i < found.grads.size(); ++i)
      deferred.emplace(found.masters[i].unsafeGetTensorImpl(), found.grads[i]);
  }

  ByTensor of_model;  // a master's parameter
  ByTensor deferred;  // a master's gradient that is still in the model
  double scale = 1;   // of the deferred gradients
};

// Calls emit(parameters, gradients, weights, scale).
template <typename Emit>
void emit_lists(torch::optim::Optimizer& optimizer, Masters* masters, const Emit& emit) {
  if (!events::wants_gradients()) return;
  const at::NoGradGuard no_grad;
  const Origins origins(masters);
  const auto* const fused = dynamic_cast<const optim::FusedOptimizer*>(&optimizer);
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> weights;
  for_each_parameter(optimizer, [&](std::size_t group, std::size_t, const at::Tensor& weight) {
    if (!weight.defined() || !seen.insert(weight.unsafeGetTensorImpl()).second) return;
    const at::Tensor of_model = find_in(origins.of_model, weight);
    const at::Tensor deferred = find_in(origins.deferred, weight);
    const bool is_split = weight.scalar_type() == at::kBFloat16 && fused != nullptr &&
                          fused->splits_masters(optimizer.param_groups()[group]);
    parameters.push_back(of_model.defined() ? of_model : weight);
    gradients.push_back(deferred.defined() ? deferred
                                           : scaled_like_deferred(weight.grad(), origins.scale));
    weights.push_back(is_split ? at::Tensor() : weight);
  });
  emit(parameters, gradients, weights, origins.scale);
}

}  // namespace

void emit_gradients(torch::optim::Optimizer& optimizer, Masters* masters) {
  emit_lists(optimizer, masters,
             [](const auto& parameters, const auto& gradients, const auto& weights, double scale) {
               events::emit(events::GradientsReady{parameters, gradients, weights, scale});
             });
}

void emit_unscaled_gradients(torch::optim::Optimizer& optimizer, Masters* masters) {
  emit_lists(optimizer, masters,
             [](const auto& parameters, const auto& gradients, const auto&, double scale) {
               events::emit(events::GradientsUnscaled{parameters, gradients, scale});
             });
}

}  // namespace semitone::amp
