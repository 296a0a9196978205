#pragma once

#include "semitone/amp/opt_level.h"

#include <c10/core/ScalarType.h>

#include <gtest/gtest.h>

#include <string>
#include <tuple>

// Tests with a case for each opt level and 16-bit dtype:
//
//     class TrainerAtEveryLevel : public ::testing::TestWithParam<LevelAndDtype> {};
//     INSTANTIATE_TEST_SUITE_P(Levels, TrainerAtEveryLevel, every_level_and_dtype(), name_of_case);
namespace semitone::train {

using LevelAndDtype = std::tuple<amp::OptLevel, c10::ScalarType>;

inline auto every_level_and_dtype() {
  using amp::OptLevel;
  return ::testing::Combine(
      ::testing::Values(OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3),
      ::testing::Values(c10::kBFloat16, c10::kHalf));
}

// "O2Fp16"
inline std::string name_of_case(const ::testing::TestParamInfo<LevelAndDtype>& info) {
  return std::string(amp::name_of(std::get<0>(info.param))) +
         (std::get<1>(info.param) == c10::kHalf ? "Fp16" : "Bf16");
}

}  // namespace semitone::train
