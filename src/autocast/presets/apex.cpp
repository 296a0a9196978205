#include "src/autocast/presets/presets.h"

#include <array>

// The functions that NVIDIA Apex's O1 patches (commit e13873de, apex/amp/lists), by the ATen
// operators that they call. No counterparts exist for softmin, normalize, local_response_norm and
// multilabel_soft_margin_loss, which consist of listed operators, and for Tensor.cpu. In-place
// forms of the float list raise on a 16-bit tensor.
namespace semitone::amp::presets {
namespace {

using Name = std::string_view;

constexpr std::array<Name, 26> kHalf{"addbmm",
                                     "addmm",
                                     "addmv",
                                     "addr",
                                     "baddbmm",
                                     "bmm",
                                     "conv1d",
                                     "conv2d",
                                     "conv3d",
                                     "conv_tbc",
                                     "conv_transpose1d",
                                     "conv_transpose2d",
                                     "conv_transpose3d",
                                     "gru",
                                     "gru_cell",
                                     "linear",
                                     "lstm",
                                     "lstm_cell",
                                     "matmul",
                                     "mm",
                                     "mv",
                                     "prelu",
                                     "rnn_relu",
                                     "rnn_relu_cell",
                                     "rnn_tanh",
                                     "rnn_tanh_cell"};

constexpr std::array<Name, 61> kFloat{"_upsample_bicubic2d_aa",
                                      "_upsample_bilinear2d_aa",
                                      "_upsample_nearest_exact1d",
                                      "_upsample_nearest_exact2d",
                                      "_upsample_nearest_exact3d",
                                      "acos",
                                      "asin",
                                      "binary_cross_entropy_with_logits",
                                      "cosh",
                                      "cosine_embedding_loss",
                                      "cosine_similarity",
                                      "cross_entropy_loss",
                                      "ctc_loss",
                                      "cumprod",
                                      "cumsum",
                                      "dist",
                                      "erfinv",
                                      "exp",
                                      "expm1",
                                      "gelu",
                                      "grid_sampler",
                                      "group_norm",
                                      "hinge_embedding_loss",
                                      "kl_div",
                                      "l1_loss",
                                      "layer_norm",
                                      "log",
                                      "log10",
                                      "log2",
                                      "log_softmax",
                                      "margin_ranking_loss",
                                      "mse_loss",
                                      "multi_margin_loss",
                                      "multilabel_margin_loss",
                                      "nll_loss",
                                      "nll_loss2d",
                                      "nll_loss_nd",
                                      "norm",
                                      "poisson_nll_loss",
                                      "pow",
                                      "prod",
                                      "reciprocal",
                                      "renorm",
                                      "rsqrt",
                                      "sinh",
                                      "smooth_l1_loss",
                                      "soft_margin_loss",
                                      "softmax",
                                      "softplus",
                                      "std",
                                      "sum",
                                      "tan",
                                      "triplet_margin_loss",
                                      "upsample_bicubic2d",
                                      "upsample_bilinear2d",
                                      "upsample_linear1d",
                                      "upsample_nearest1d",
                                      "upsample_nearest2d",
                                      "upsample_nearest3d",
                                      "upsample_trilinear3d",
                                      "var"};

constexpr std::array<Name, 20> kWidest{
    "add",   "addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "div",  "dot",   "eq",
    "equal", "ge",      "gt",      "le",    "lt",       "mul", "ne",    "rsub", "stack", "sub"};

constexpr std::array<Name, 18> kBanned{"acos_",   "asin_",       "binary_cross_entropy",
                                       "cosh_",   "cumprod_",    "cumsum_",
                                       "erfinv_", "exp_",        "expm1_",
                                       "log10_",  "log2_",       "log_",
                                       "pow_",    "reciprocal_", "renorm_",
                                       "rsqrt_",  "sinh_",       "tan_"};

constexpr std::array<Rows, 4> kApex{{
    {CastAction::lower, kHalf},
    {CastAction::fp32, kFloat},
    {CastAction::widest, kWidest},
    {CastAction::ban, kBanned},
}};

}  // namespace

std::span<const Rows> apex() {
  return kApex;
}

}  // namespace semitone::amp::presets
