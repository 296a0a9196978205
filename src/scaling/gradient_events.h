#pragma once

// Internal interface: other rooms include this header.

#include <torch/optim/optimizer.h>

namespace semitone::amp {

class Masters;

// Emits events::GradientsReady for the next step of an optimizer, if there is a listener. Its
// gradients are unscaled, or deferred.
// @param masters  of the optimizer; null without any
void emit_gradients(torch::optim::Optimizer& optimizer, Masters* masters = nullptr);
// The same of events::GradientsUnscaled, after a backward pass.
void emit_unscaled_gradients(torch::optim::Optimizer& optimizer, Masters* masters = nullptr);

}  // namespace semitone::amp
