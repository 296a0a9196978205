#pragma once

#include "tests/support/toy_nets.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <set>
#include <utility>

namespace semitone::train {

// A DropNet whose loss is a spike in some steps of its training, counted from 1. The gradients of
// these steps are 0 if the loss is finite, and NaN if it is NaN.
struct SpikyNetImpl : torch::nn::Module {
  // @param factor  a large negative number, which makes the least likely class the likeliest, or NaN
  SpikyNetImpl(std::set<std::int64_t> bad_steps_, double factor_)
      : bad_steps(std::move(bad_steps_)), factor(factor_) {
    register_module("inner", inner);
  }
  at::Tensor forward(const at::Tensor& images) {
    const at::Tensor logits = inner->forward(images);
    if (!is_training() || !bad_steps.contains(++step)) return logits;
    return logits.detach() * factor + logits * 0;
  }

  std::set<std::int64_t> bad_steps;
  double factor;
  std::int64_t step = 0;
  test::DropNet inner{0.2};
};
TORCH_MODULE(SpikyNet);

inline constexpr double kSpike = -100;

}  // namespace semitone::train
