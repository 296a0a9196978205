#include "semitone/nn/fused_dense.h"

#include "semitone/core/error.h"
#include "semitone/nn/fused_gelu.h"

#include <torch/nn/init.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace semitone::nn {
namespace {

// The initial values of torch::nn::Linear.
void reset_linear(at::Tensor& weight, at::Tensor& bias) {
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));
  if (!bias.defined()) return;
  const double bound = 1 / std::sqrt(static_cast<double>(weight.size(1)));
  torch::nn::init::uniform_(bias, -bound, bound);
}

at::Tensor empty_if(bool wanted, std::int64_t size) {
  return wanted ? torch::empty({size}) : at::Tensor();
}

at::Tensor linear_gelu(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                       std::string_view approximate) {
  const at::Tensor product = at::linear(input, weight);
  return bias.defined() ? fused_bias_gelu(product, bias, approximate)
                        : fused_gelu(product, approximate);
}

void check(const MLPOptions& options) {
  constexpr auto kComponent = "nn.mlp";
  const auto& sizes = options.sizes();
  if (sizes.size() < 2 ||
      std::any_of(sizes.begin(), sizes.end(), [](auto size) { return size < 1; }))
    throw Error(kComponent, "2 positive sizes or more", c10::str(torch::IntArrayRef(sizes)));
  const std::string& name = options.activation();
  if (name != "none" && name != "relu" && name != "sigmoid" && name != "gelu") {
    throw Error(kComponent, "an activation 'none', 'relu', 'sigmoid' or 'gelu'",
                c10::str("'", name, "'"));
  }
}

}  // namespace

FusedDenseImpl::FusedDenseImpl(const FusedDenseOptions& options_) : options(options_) {
  FusedDenseImpl::reset();
}

void FusedDenseImpl::reset() {
  weight =
      register_parameter("weight", torch::empty({options.out_features(), options.in_features()}));
  bias =
      register_parameter("bias", empty_if(options.bias(), options.out_features()), options.bias());
  reset_parameters();
}

void FusedDenseImpl::reset_parameters() {
  reset_linear(weight, bias);
}

at::Tensor FusedDenseImpl::forward(const at::Tensor& input) {
  return at::linear(input, weight, bias);
}

void FusedDenseImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "semitone::nn::FusedDense(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << options.bias() << ")";
}

FusedDenseGeluDenseImpl::FusedDenseGeluDenseImpl(FusedDenseGeluDenseOptions options_)
    : options(std::move(options_)) {
  FusedDenseGeluDenseImpl::reset();
}

void FusedDenseGeluDenseImpl::reset() {
  const std::int64_t in = options.in_features();
  const std::int64_t intermediate = options.intermediate_features();
  const std::int64_t out = options.out_features();
  weight1 = register_parameter("weight1", torch::empty({intermediate, in}));
  bias1 = register_parameter("bias1", empty_if(options.bias(), intermediate), options.bias());
  weight2 = register_parameter("weight2", torch::empty({out, intermediate}));
  bias2 = register_parameter("bias2", empty_if(options.bias(), out), options.bias());
  reset_parameters();
}

void FusedDenseGeluDenseImpl::reset_parameters() {
  reset_linear(weight1, bias1);
  reset_linear(weight2, bias2);
}

at::Tensor FusedDenseGeluDenseImpl::forward(const at::Tensor& input) {
  return at::linear(linear_gelu(input, weight1, bias1, options.approximate()), weight2, bias2);
}

void FusedDenseGeluDenseImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha
         << "semitone::nn::FusedDenseGeluDense(in_features=" << options.in_features()
         << ", intermediate_features=" << options.intermediate_features()
         << ", out_features=" << options.out_features() << ", bias=" << options.bias()
         << ", approximate=" << options.approximate() << ")";
}

MLPImpl::MLPImpl(MLPOptions options_) : options(std::move(options_)) {
  check(options);
  MLPImpl::reset();
}

void MLPImpl::reset() {
  weights.clear();
  biases.clear();
  const auto& sizes = options.sizes();
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
    const std::string number = std::to_string(i);
    weights.push_back(
        register_parameter("weight_" + number, torch::empty({sizes[i + 1], sizes[i]})));
    biases.push_back(register_parameter("bias_" + number, empty_if(options.bias(), sizes[i + 1]),
                                        options.bias()));
  }
  reset_parameters();
}

void MLPImpl::reset_parameters() {
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto out = static_cast<double>(weights[i].size(0));
    const auto in = static_cast<double>(weights[i].size(1));
    torch::nn::init::normal_(weights[i], 0, std::sqrt(2 / (in + out)));
    if (biases[i].defined()) torch::nn::init::normal_(biases[i], 0, std::sqrt(1 / out));
  }
}

at::Tensor MLPImpl::forward(const at::Tensor& input) {
  const std::string& activation = options.activation();
  at::Tensor result = input;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (activation == "gelu") {
      result = linear_gelu(result, weights[i], biases[i], "none");
      continue;
    }
    result = at::linear(result, weights[i], biases[i]);
    if (activation == "relu") result.relu_();
    if (activation == "sigmoid") result.sigmoid_();
  }
  return result;
}

void MLPImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "semitone::nn::MLP(sizes=" << torch::IntArrayRef(options.sizes())
         << ", bias=" << options.bias() << ", activation=" << options.activation() << ")";
}

}  // namespace semitone::nn
