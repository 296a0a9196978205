#include "src/autocast/presets/presets.h"

#include <algorithm>
#include <array>

namespace semitone::amp::presets {
namespace {

using Name = std::string_view;

struct Reason {
  std::string_view text;
  std::span<const Name> ops;
};

template <typename... Names>
constexpr auto names(Names... values) {
  return std::array<Name, sizeof...(values)>{values...};
}

constexpr auto kRange = names("acos", "asin", "atanh", "cosh", "erfinv", "exp", "expm1", "log",
                              "log10", "log1p", "log2", "pow", "reciprocal", "rsqrt", "sinh",
                              "softplus", "square", "tan", "gelu", "polar");
constexpr auto kSums =
    names("sum", "prod", "cumsum", "cumprod", "mean", "std", "var", "norm", "frobenius_norm",
          "nuclear_norm", "linalg_vector_norm", "linalg_matrix_norm", "dist", "pdist", "cdist",
          "renorm", "logsumexp", "cosine_similarity", "trace", "quantile", "nanquantile");
constexpr auto kSoftmax = names("softmax", "log_softmax");
constexpr auto kLosses = names(
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
    "cross_entropy_loss", "ctc_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_margin_loss_forward", "nll_loss", "nll_loss2d", "nll_loss_nd", "poisson_nll_loss",
    "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss");
constexpr auto kNorms = names("layer_norm", "native_layer_norm", "group_norm", "rms_norm");
constexpr auto kSampling =
    names("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
          "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
          "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
          "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler", "grid_sampler_2d",
          "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback", "embedding", "scatter");
constexpr auto kPooling = names("max_pool2d", "max_pool2d_with_indices");

constexpr std::array<Reason, 6> kFp32Reasons{{
    {"leaves fp16's range, or cancels where 16 bits round", kRange},
    {"adds or multiplies many terms", kSums},
    {"exponentials, then a sum over a row", kSoftmax},
    {"a loss: small differences, and the start of the backward pass", kLosses},
    {"statistics over many terms", kNorms},
    {"coordinates and gathered gradients need more than 8 to 11 bits", kSampling},
}};

bool contains(std::span<const Name> ops, std::string_view op) {
  return std::find(ops.begin(), ops.end(), op) != ops.end();
}

}  // namespace

std::span<const std::string_view> losses() {
  return kLosses;
}

std::string_view reason(CastAction action, std::string_view op) {
  switch (action) {
    case CastAction::lower:
      return contains(kPooling, op) ? "no arithmetic: half the memory traffic"
                                    : "matrix products: 16-bit inputs are fast, sums stay in fp32";
    case CastAction::fp32:
      for (const Reason& candidate : kFp32Reasons) {
        if (contains(candidate.ops, op)) return candidate.text;
      }
      return "no 16-bit kernel, or one that is not worth its error";
    case CastAction::promote:
    case CastAction::widest:
      return "arguments must share a dtype";
    case CastAction::leave:
      return contains(kNorms, op)
                 ? "keeps its statistics in fp32 whatever arrives: a cast buys nothing"
                 : "as it comes";
    case CastAction::ban:
      return op == "binary_cross_entropy"
                 ? "gradients of 16-bit probabilities underflow: use the _with_logits form"
                 : "writes an fp32 result into a 16-bit tensor: use the out-of-place form";
  }
  return "";
}

}  // namespace semitone::amp::presets
