#pragma once

#include "semitone/amp/mixed_precision.h"
#include "semitone/amp/opt_level.h"
#include "semitone/autocast/model.h"

#include <torch/optim/optimizer.h>

#include <vector>

namespace semitone::amp {

/// Prepares models and optimizers for an opt level, in place. Apex: amp.initialize.
///
///     auto mixed = amp::initialize(model, optimizer, amp::Options(amp::OptLevel::O2));
///     for (auto& batch : *loader) {
///       optimizer.zero_grad();
///       auto loss = torch::cross_entropy_loss(mixed.forward(model, batch.data), batch.target);
///       mixed.scale_loss(loss, optimizer).backward();
///       mixed.clip_grad_norm_(optimizer, 1.0);
///       mixed.step(optimizer);
///     }
///
/// Call it once, after the models are on their device and the optimizers are constructed, and
/// before models are wrapped for data-parallel training. Weights may be loaded before or after the
/// call.
///
/// Keep the returned object for as long as training lasts. Its destructor leaves the models in the
/// dtypes that they were cast to, and puts the models' own parameters back into the optimizers,
/// with their state. Training at O2 would then continue as at O3.
///
/// If it throws, models and optimizers are unchanged. Error if a floating parameter or buffer is
/// not fp32 (the message names it), if an optimizer does not support the level (LBFGS with a loss
/// scale or master weights), or if options contradict each other. Models and optimizers must
/// outlive the returned object; models held by shared pointers are kept alive.
[[nodiscard]] MixedPrecision initialize(const Model& model, torch::optim::Optimizer& optimizer,
                                        const Options& options = {});
[[nodiscard]] MixedPrecision initialize(const std::vector<Model>& models,
                                        const OptimizerRefs& optimizers,
                                        const Options& options = {});
/// Prepares a model only: for inference, or for weights that the program updates without an
/// optimizer.
[[nodiscard]] MixedPrecision initialize(const Model& model, const Options& options = {});

}  // namespace semitone::amp
