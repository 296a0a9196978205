#pragma once

#include "semitone/amp/mixed_precision.h"
#include "semitone/core/events.h"
#include "src/amp/cudnn_scope.h"
#include "src/amp/gradients.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace semitone::amp {

// What amp::initialize made. mixed_precision.cpp sets it up and runs models, scaled_loss.cpp takes
// gradients through their scale, mixed_precision_io.cpp saves and loads.
struct MixedPrecision::Impl {
  // Gradients in a model that are multiplied by a loss scale.
  struct Scaled {
    std::int64_t loss_id;
    float inverse;  // of the scale
    bool open;      // a ScaledLoss is at it; else delay_unscale left them
  };

  struct PerOptimizer {
    torch::optim::Optimizer* optimizer;
    std::optional<MasterWeights> masters;
    std::optional<Scaled> scaled;
    bool skip = false;  // the next step: a loss overflowed

    // Calls visit(parameter) for what backward gives gradients to: the model's parameters, not
    // their masters.
    template <typename Visit>
    void for_each_leaf(Visit&& visit) const {
      if (masters.has_value()) {
        masters->for_each(
            [&](const at::Tensor& parameter, const at::Tensor&) { visit(parameter); });
      }
      for_each_parameter(*optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
        if (!masters.has_value() || !masters->is_master(parameter)) visit(parameter);
      });
    }
  };

  // What the backward passes of a loss found, which the host has not looked at yet.
  struct Pending {
    std::int64_t loss_id;
    std::vector<PerOptimizer*> optimizers;
    std::vector<at::Tensor> found_inf;
  };

  // The scale of one loss in a device's memory.
  struct ScaleOnDevice {
    std::int64_t loss_id;
    at::Tensor scale;
    at::Tensor inverse;
  };

  // A parameter and its gradient.
  struct SetAside {
    at::Tensor parameter;
    at::Tensor grad;
  };

  Properties properties;
  std::vector<Model> models;
  std::optional<CastPolicy> policy;  // of the region that forward runs in
  std::vector<PerOptimizer> optimizers;
  std::vector<LossScaler> scalers;
  std::vector<Pending> pending;
  // Gradients from before a scaled backward, which are not scaled: kept apart from those in the
  // model until these are unscaled.
  std::unordered_map<const c10::TensorImpl*, SetAside> set_aside;
  // While a step is captured: stands for the scaler's number.
  std::optional<ScaleOnDevice> scale_on_device;
  ParameterNames names;
  FoundInfHook found_inf_hook;
  std::optional<CudnnScope> cudnn;
  std::shared_ptr<events::Listener> cast_log;
  int fp32_scopes = 0;  // Fp32Weights that are alive

  PerOptimizer& of(const torch::optim::Optimizer& optimizer, const char* caller);
  const Model& of(const void* identity, const char* caller) const;
  LossScaler& scaler(std::int64_t loss_id, const char* caller);

  // Moves gradients that are in the model, and are not scaled, to the masters.
  static void take_gradients_by_hand(PerOptimizer& known);

  // Error while an optimizer's gradients are scaled.
  static void require_unscaled(const PerOptimizer& known, const char* caller);

  // The end of an optimizer's step whose gradients are unscaled and checked: calls take() unless it is
  // skipped, and moves the scales.
  Step end_step(PerOptimizer& known, const std::function<void()>& take);

  // MasterWeights::pull and sync of every optimizer. Error inside fp32_weights().
  void pull(const char* caller);
  void sync(const char* caller);

 private:
  void require_own_dtypes(const char* caller) const;
};

}  // namespace semitone::amp
