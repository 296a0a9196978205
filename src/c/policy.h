#pragma once

#include "semitone/autocast/cast_policy.h"

#include <torch/nn/module.h>

#include <memory>

struct SemitonePolicy {
  static constexpr const char* kType = "SemitonePolicy";
  semitone::amp::CastPolicy policy;
  std::shared_ptr<torch::nn::Module> parameters = {};  // to which the policy is bound
};
