#include "semitone/nn/fused_rms_norm.h"

#include "src/nn/layer_norm.h"

#include <torch/nn/init.h>
#include <torch/types.h>

#include <limits>
#include <utility>

namespace semitone::nn {
namespace {

double default_eps(const at::Tensor& input) {
  return input.defined() && input.scalar_type() == at::kDouble
             ? std::numeric_limits<double>::epsilon()
             : static_cast<double>(std::numeric_limits<float>::epsilon());
}

}  // namespace

at::Tensor fused_rms_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                          const at::Tensor& weight, std::optional<double> eps) {
  return layer_norm(input, {.component = "nn.fused_rms_norm",
                            .normalized_shape = normalized_shape,
                            .centred = false,
                            .eps = eps.value_or(default_eps(input)),
                            .weight = weight});
}

FusedRMSNormImpl::FusedRMSNormImpl(FusedRMSNormOptions options_) : options(std::move(options_)) {
  FusedRMSNormImpl::reset();
}

void FusedRMSNormImpl::reset() {
  const bool affine = options.elementwise_affine();
  weight = register_parameter(
      "weight", affine ? torch::empty(options.normalized_shape()) : at::Tensor(), affine);
  reset_parameters();
}

void FusedRMSNormImpl::reset_parameters() {
  if (options.elementwise_affine()) torch::nn::init::ones_(weight);
}

at::Tensor FusedRMSNormImpl::forward(const at::Tensor& input) {
  return fused_rms_norm(input, options.normalized_shape(), weight, options.eps());
}

void FusedRMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "semitone::nn::FusedRMSNorm("
         << torch::IntArrayRef(options.normalized_shape()) << ", eps=";
  if (options.eps().has_value()) {
    stream << *options.eps();
  } else {
    stream << "None";
  }
  stream << ", elementwise_affine=" << options.elementwise_affine() << ")";
}

}  // namespace semitone::nn
