#pragma once

#include "semitone/core/dtype.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <string>

// Dtypes, and the dtype of an operator in a region.
namespace semitone::amp::autocast_test {

inline constexpr auto kCpu = torch::kCPU;
inline constexpr auto kFp32 = torch::kFloat;
inline constexpr auto kFp16 = torch::kHalf;
inline constexpr auto kBf16 = torch::kBFloat16;

// The dtype of a matrix product of fp32 tensors in the current region.
inline c10::ScalarType product_dtype() {
  return at::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

inline std::string dtype_param_name(const testing::TestParamInfo<c10::ScalarType>& tested) {
  return dtype_name(tested.param);
}

}  // namespace semitone::amp::autocast_test
