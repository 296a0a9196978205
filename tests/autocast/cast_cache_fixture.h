#pragma once

#include "semitone/autocast/autocast.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>

// A product with a weight whose cast is cached.
namespace semitone::amp::cast_cache_test {

using test::expect_close;

inline constexpr auto kBf16 = torch::kBFloat16;
inline constexpr auto kFp16 = torch::kHalf;

// Sizes of no other tensor here, so that casts of the weight are recognised by their size.
inline constexpr std::int64_t kIn = 6;
inline constexpr std::int64_t kOut = 5;
inline constexpr std::int64_t kWeight = kIn * kOut;

class CastCacheTest : public testing::Test {
 protected:
  CastCacheTest() { torch::manual_seed(7); }

  // x @ weight without a cache: the expected result of every use.
  at::Tensor product(c10::ScalarType dtype = kBf16) const {
    return at::mm(x.to(dtype), weight.detach().to(dtype));
  }
  void expect_current(const at::Tensor& got, c10::ScalarType dtype = kBf16) const {
    const DisableCasts no_casts;
    expect_close(got, product(dtype), test::reduction_tolerance(dtype, kIn));
  }

  at::Tensor x = torch::rand({3, kIn});
  at::Tensor weight = torch::rand({kIn, kOut}).requires_grad_();
  CastPolicy bf16 = CastPolicy::semitone({torch::kCPU, kBf16});
  CastPolicy fp16 = CastPolicy::semitone({torch::kCPU, kFp16});
};

}  // namespace semitone::amp::cast_cache_test
