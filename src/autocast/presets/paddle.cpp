#include "src/autocast/presets/presets.h"

#include <array>

// PaddlePaddle 3.3 (paddle/amp/amp_lists), by the corresponding ATen operators. Paddle's "mul" and
// "matmul_v2" are matrix products. No counterparts exist for its fused and collective operators,
// hsigmoid_loss and margin_cross_entropy; tanh_shrink and softmin consist of other operators.
// mse_loss is Paddle's square and mean, smooth_l1_loss its huber_loss. Operators in neither list
// compute in the widest dtype of their arguments, which LibTorch does by itself.
namespace semitone::amp::presets {
namespace {

using Name = std::string_view;

constexpr std::array<Name, 11> kWhite{"addmm",
                                      "bmm",
                                      "conv2d",
                                      "einsum",
                                      "linear",
                                      "matmul",
                                      "max_pool2d",
                                      "max_pool2d_with_indices",
                                      "mm",
                                      "mv",
                                      "scaled_dot_product_attention"};

constexpr std::array<Name, 11> kSlowIn16Bits{"_upsample_bicubic2d_aa",
                                             "_upsample_bilinear2d_aa",
                                             "embedding",
                                             "scatter",
                                             "upsample_bicubic2d",
                                             "upsample_bilinear2d",
                                             "upsample_linear1d",
                                             "upsample_nearest1d",
                                             "upsample_nearest2d",
                                             "upsample_nearest3d",
                                             "upsample_trilinear3d"};

constexpr std::array<Name, 41> kBlack{"acos",
                                      "asin",
                                      "atanh",
                                      "binary_cross_entropy",
                                      "binary_cross_entropy_with_logits",
                                      "cosh",
                                      "cross_entropy_loss",
                                      "cumprod",
                                      "cumsum",
                                      "dist",
                                      "erfinv",
                                      "exp",
                                      "expm1",
                                      "frobenius_norm",
                                      "group_norm",
                                      "huber_loss",
                                      "layer_norm",
                                      "linalg_vector_norm",
                                      "log",
                                      "log10",
                                      "log2",
                                      "log_softmax",
                                      "mean",
                                      "mse_loss",
                                      "nll_loss",
                                      "nll_loss2d",
                                      "nll_loss_nd",
                                      "norm",
                                      "pow",
                                      "prod",
                                      "reciprocal",
                                      "renorm",
                                      "rsqrt",
                                      "sinh",
                                      "smooth_l1_loss",
                                      "softmax",
                                      "softplus",
                                      "square",
                                      "sum",
                                      "tan",
                                      "triplet_margin_loss"};

constexpr std::array<Rows, 3> kO1{{
    {CastAction::lower, kWhite},
    {CastAction::fp32, kBlack},
    {CastAction::fp32, kSlowIn16Bits},
}};

constexpr std::array<Rows, 2> kO2{{
    {CastAction::lower, kWhite},
    {CastAction::fp32, kSlowIn16Bits},
}};

}  // namespace

std::span<const Rows> paddle_o1() {
  return kO1;
}
std::span<const Rows> paddle_o2() {
  return kO2;
}

}  // namespace semitone::amp::presets
