#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace semitone::nn {

/// LibTorch's options: in_features, out_features, bias (true).
using FusedDenseOptions = torch::nn::LinearOptions;

/// Apex's name for a linear layer whose matrix product adds the bias. It calls at::linear.
/// torch::nn::Linear calls addmm for 2-D inputs; for more dimensions it calls matmul and adds the
/// bias in a separate pass. Parameters have torch::nn::Linear's names, shapes and initial values,
/// so that each class loads what the other saved.
class FusedDenseImpl : public torch::nn::Cloneable<FusedDenseImpl> {
 public:
  FusedDenseImpl(std::int64_t in_features, std::int64_t out_features)
      : FusedDenseImpl(FusedDenseOptions(in_features, out_features)) {}
  explicit FusedDenseImpl(const FusedDenseOptions& options_);

  /// (…, in_features) to (…, out_features).
  at::Tensor forward(const at::Tensor& input);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  FusedDenseOptions options;
  at::Tensor weight;  ///< (out_features, in_features)
  at::Tensor bias;    ///< (out_features); undefined without bias
};
TORCH_MODULE(FusedDense);

/// Options of FusedDenseGeluDense.
struct FusedDenseGeluDenseOptions {
  FusedDenseGeluDenseOptions(std::int64_t in_features, std::int64_t intermediate_features,
                             std::int64_t out_features)
      : in_features_(in_features),
        intermediate_features_(intermediate_features),
        out_features_(out_features) {}

  TORCH_ARG(std::int64_t, in_features);
  TORCH_ARG(std::int64_t, intermediate_features);
  TORCH_ARG(std::int64_t, out_features);
  /// Whether both products have a bias.
  TORCH_ARG(bool, bias) = true;
  /// Approximation of the GELU: "none" or "tanh".
  TORCH_ARG(std::string, approximate) = "none";
};

/// linear(gelu(linear(x))), the feed-forward part of a transformer. The first bias and the GELU are
/// one pass forward, and their gradients are one pass backward (fused_bias_gelu). The result of the
/// matrix product is rounded to the input's dtype. The sum with the bias is not rounded before the
/// GELU. Parameters have the names of Apex's layer and the initial values of torch::nn::Linear.
class FusedDenseGeluDenseImpl : public torch::nn::Cloneable<FusedDenseGeluDenseImpl> {
 public:
  FusedDenseGeluDenseImpl(std::int64_t in_features, std::int64_t intermediate_features,
                          std::int64_t out_features)
      : FusedDenseGeluDenseImpl(
            FusedDenseGeluDenseOptions(in_features, intermediate_features, out_features)) {}
  explicit FusedDenseGeluDenseImpl(FusedDenseGeluDenseOptions options_);

  /// (…, in_features) to (…, out_features).
  at::Tensor forward(const at::Tensor& input);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  FusedDenseGeluDenseOptions options;
  at::Tensor weight1;  ///< (intermediate_features, in_features)
  at::Tensor bias1;    ///< (intermediate_features); undefined without bias
  at::Tensor weight2;  ///< (out_features, intermediate_features)
  at::Tensor bias2;    ///< (out_features); undefined without bias
};
TORCH_MODULE(FusedDenseGeluDense);

/// Options of MLP.
struct MLPOptions {
  MLPOptions(std::vector<std::int64_t> sizes)  // NOLINT(google-explicit-constructor): as LibTorch's
      : sizes_(std::move(sizes)) {}

  /// Number of features of the input and of each layer: at least two numbers, all positive.
  TORCH_ARG(std::vector<std::int64_t>, sizes);
  /// Whether the layers have a bias.
  TORCH_ARG(bool, bias) = true;
  /// Applied after each layer, including the last: "none", "relu", "sigmoid" or "gelu".
  TORCH_ARG(std::string, activation) = "relu";
};

/// Apex's MLP: linear layers, each with its bias and activation. Parameters are weight_0, bias_0,
/// weight_1 … Initial values are Apex's: weights normal with variance 2 / (in + out), biases normal
/// with variance 1 / out.
///
///     nn::MLP mlp(nn::MLPOptions({480, 1024, 256}).activation("gelu"));
///
/// Bias and GELU are one pass. ReLU and sigmoid are applied in place to the product.
///
/// Error for invalid sizes and activations.
class MLPImpl : public torch::nn::Cloneable<MLPImpl> {
 public:
  explicit MLPImpl(MLPOptions options_);

  /// (…, sizes.front()) to (…, sizes.back()).
  at::Tensor forward(const at::Tensor& input);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  MLPOptions options;
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;  ///< undefined tensors without bias
};
TORCH_MODULE(MLP);

}  // namespace semitone::nn
