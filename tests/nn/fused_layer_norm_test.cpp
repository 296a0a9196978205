#include "semitone/nn/fused_layer_norm.h"

#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <sstream>

namespace semitone::nn {
namespace {

using test::expect_bitwise_equal;

template <typename From, typename To>
void expect_state_travels(From from, To to) {
  {
    const torch::NoGradGuard no_grad;
    from->weight.uniform_();
    from->bias.uniform_();
  }
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
  expect_bitwise_equal(to->weight, from->weight);
  expect_bitwise_equal(to->bias, from->bias);
}

TEST(FusedLayerNorm, StateIsThatOfLibTorchsLayer) {
  const FusedLayerNormOptions options({3, 4});
  expect_state_travels(FusedLayerNorm(options), torch::nn::LayerNorm(options));
  expect_state_travels(torch::nn::LayerNorm(options), FusedLayerNorm(options));
}

}  // namespace
}  // namespace semitone::nn
