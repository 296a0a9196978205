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

/// LibTorch's: in_features, out_features, bias (true).
using FusedDenseOptions = torch::nn::LinearOptions;

/// Apex's name for a linear layer whose bias the matrix product adds: at::linear, as
/// torch::nn::Linear should be (it calls addmm or matmul, and with three dimensions and more adds the
/// bias in a pass of its own). Parameters have torch::nn::Linear's names, shapes and initial values,
/// so what torch::save wrote of one torch::load reads into the other.
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
  /// Of the GELU: "none" or "tanh".
  TORCH_ARG(std::string, approximate) = "none";
};

/// linear(gelu(linear(x))), the feed-forward part of a transformer: the first bias, the GELU and the
/// gradients of both are one pass each way (fused_bias_gelu). Between product and GELU nothing is
/// rounded but the product. Parameters have the names of Apex's layer, and start as
/// torch::nn::Linear's do.
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

/// Options of Mlp.
struct MlpOptions {
  MlpOptions(std::vector<std::int64_t> sizes)  // NOLINT(google-explicit-constructor): as LibTorch's
      : sizes_(std::move(sizes)) {}

  /// Features of the input and of each layer: at least 2, all positive.
  TORCH_ARG(std::vector<std::int64_t>, sizes);
  /// Whether the layers have a bias.
  TORCH_ARG(bool, bias) = true;
  /// After each layer, the last too: "none", "relu", "sigmoid" or "gelu".
  TORCH_ARG(std::string, activation) = "relu";
};

/// Apex's MLP: linear layers, each with its bias and activation. Parameters are weight_0, bias_0,
/// weight_1 …, and start as Apex's: weights normal with variance 2 / (in + out), biases normal with
/// variance 1 / out.
///
///     nn::Mlp mlp(nn::MlpOptions({480, 1024, 256}).activation("gelu"));
///
/// Bias and GELU are one pass; ReLU and sigmoid run in place on the product.
///
/// Error for other sizes and activations.
class MlpImpl : public torch::nn::Cloneable<MlpImpl> {
 public:
  explicit MlpImpl(MlpOptions options_);

  /// (…, sizes.front()) to (…, sizes.back()).
  at::Tensor forward(const at::Tensor& input);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  MlpOptions options;
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;  ///< undefined ones without bias
};
TORCH_MODULE(Mlp);

}  // namespace semitone::nn
