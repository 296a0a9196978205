#include "semitone/nn/fused_layer_norm.h"

#include "src/nn/layer_norm.h"

#include <torch/nn/init.h>
#include <torch/types.h>

#include <utility>

namespace semitone::nn {

at::Tensor fused_layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                            const at::Tensor& weight, const at::Tensor& bias, double eps) {
  return layer_norm(input, {.component = "nn.fused_layer_norm",
                            .normalized_shape = normalized_shape,
                            .centred = true,
                            .eps = eps,
                            .weight = weight,
                            .bias = bias});
}

FusedLayerNormImpl::FusedLayerNormImpl(FusedLayerNormOptions options_)
    : options(std::move(options_)) {
  FusedLayerNormImpl::reset();
}

void FusedLayerNormImpl::reset() {
  const bool affine = options.elementwise_affine();
  const auto make = [&] {
    return affine ? torch::empty(options.normalized_shape()) : at::Tensor();
  };
  weight = register_parameter("weight", make(), affine);
  bias = register_parameter("bias", make(), affine);
  reset_parameters();
}

void FusedLayerNormImpl::reset_parameters() {
  if (!options.elementwise_affine()) return;
  torch::nn::init::ones_(weight);
  torch::nn::init::zeros_(bias);
}

at::Tensor FusedLayerNormImpl::forward(const at::Tensor& input) {
  return fused_layer_norm(input, options.normalized_shape(), weight, bias, options.eps());
}

void FusedLayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "semitone::nn::FusedLayerNorm("
         << torch::IntArrayRef(options.normalized_shape()) << ", eps=" << options.eps()
         << ", elementwise_affine=" << options.elementwise_affine() << ")";
}

}  // namespace semitone::nn
