// Layers and functions that do the work of several operators in one pass over memory, compared with
// those of LibTorch that they replace.
#include <semitone/nn.h>

#include <torch/torch.h>

#include <cstddef>
#include <iostream>

namespace nn = semitone::nn;

namespace {

bool right = true;

void compare(const char* name, const torch::Tensor& fused, const torch::Tensor& reference) {
  const double apart = (fused - reference).abs().max().item<double>();
  std::cout << name << ": differs by " << apart << '\n';
  right = right && fused.sizes() == reference.sizes() && apart < 1e-4;
}

// Copies the weights of a layer to a layer of LibTorch.
template <typename From, typename To>
void copy(const From& from, const To& to) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < to->parameters().size(); ++i)
    to->parameters()[i].copy_(from->parameters()[i]);
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const auto x = torch::randn({32, 64});

  // Normalisation: layers, and functions with Apex's eps.
  nn::FusedLayerNorm layer_norm(nn::FusedLayerNormOptions({64}));
  torch::nn::LayerNorm reference(torch::nn::LayerNormOptions({64}));
  compare("FusedLayerNorm", layer_norm(x), reference(x));
  nn::FusedRMSNorm rms_norm(nn::FusedRMSNormOptions({64}).eps(1e-5));  // as Apex's layer
  const auto rms = [](const torch::Tensor& rows, double eps) {
    return rows * torch::rsqrt(rows.square().mean(1, true) + eps);
  };
  compare("FusedRMSNorm", rms_norm(x), rms(x, 1e-5));
  const auto weight = torch::rand({64});
  const auto bias = torch::rand({64});
  compare("fused_layer_norm", nn::fused_layer_norm(x, {64}, weight, bias, 1e-6),
          torch::layer_norm(x, {64}, weight, bias, 1e-6));
  compare("fused_layer_norm without weights", nn::fused_layer_norm(x, {64}, {}, {}, 1e-6),
          torch::layer_norm(x, {64}, {}, {}, 1e-6));
  compare("fused_rms_norm", nn::fused_rms_norm(x, {64}, weight, 1e-6), weight * rms(x, 1e-6));
  // A 16-bit input with fp32 weights: the result has the input's dtype.
  right = right && layer_norm(x.to(torch::kHalf)).scalar_type() == torch::kHalf;

  // BatchNorm with a ReLU, in any memory format.
  nn::FusedBatchNorm batch_norm(nn::FusedBatchNormOptions(4).relu(true));
  torch::nn::BatchNorm2d batch_norm_2d(4);
  const auto images = torch::randn({8, 4, 6, 6}).contiguous(torch::MemoryFormat::ChannelsLast);
  compare("FusedBatchNorm", batch_norm(images), torch::relu(batch_norm_2d(images)));

  // Dense layers: one pass computes the bias, GELU and their gradients.
  nn::FusedDense dense(64, 16);
  torch::nn::Linear linear(64, 16);
  copy(dense, linear);
  compare("FusedDense", dense(x), linear(x));
  nn::FusedDenseGeluDense block(64, 128, 64);
  torch::nn::Sequential layers(torch::nn::Linear(64, 128), torch::nn::GELU(),
                               torch::nn::Linear(128, 64));
  copy(block, layers);
  compare("FusedDenseGeluDense", block(x), layers->forward(x));
  nn::MLP mlp(nn::MLPOptions({64, 32, 16}).activation("relu"));
  const auto layer = [&](const torch::Tensor& rows, std::size_t i) {
    return torch::relu(at::linear(rows, mlp->weights[i], mlp->biases[i]));
  };
  compare("MLP", mlp(x), layer(layer(x, 0), 1));
  const auto matrix = torch::randn({64, 64}) / 8;
  compare("fused_bias_gelu", nn::fused_bias_gelu(at::linear(x, matrix), bias),
          torch::gelu(at::linear(x, matrix, bias)));

  // The loss of each row, with smoothed labels, and without the rows of class 0, which are padding.
  const auto labels = torch::randint(64, {32});
  const auto losses = nn::fused_cross_entropy(
      x, labels,
      nn::FusedCrossEntropyOptions().ignore_index(0).reduction(torch::kNone).label_smoothing(0.1));
  compare("fused_cross_entropy", losses,
          torch::cross_entropy_loss(x, labels, {}, at::Reduction::None, 0, 0.1));
  return right ? 0 : 1;
}
