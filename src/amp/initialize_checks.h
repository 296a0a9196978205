#pragma once

#include "semitone/amp/mixed_precision.h"

#include <vector>

// What amp::initialize requires of its arguments, checked before anything is changed.
namespace semitone::amp {

// Error if a floating-point tensor of a model is not fp32.
void check_model(const Model& model);

// Error if an optimizer is named twice, cannot be used with these properties, or shares parameters
// with another one while there are master weights.
void check_optimizers(const OptimizerRefs& optimizers, const Properties& properties);

// The device with most of the models' elements.
c10::DeviceType device_of_models(const std::vector<Model>& models);

// A tensor of a model on the device that it is prepared for; undefined for a model without tensors.
// Error if it has tensors, but none there: its operators would run without casts.
at::Tensor tensor_on(c10::DeviceType device, const Model& model);

}  // namespace semitone::amp
