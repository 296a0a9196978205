#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <string_view>

// The operators that CastKernel treats specially, whatever the policy says.
namespace semitone::amp {

// cuDNN's recurrent networks: LibTorch's own kernel rebuilds cuDNN's flat weight buffer, so a plain
// cast of the arguments would not be sufficient.
inline constexpr std::string_view kCudnnRnn = "_cudnn_rnn";

// TorchScript has its own autocast: when it compiles a function inside a region, it writes these
// casts into the graph, from its own list. In Semitone's regions they do nothing, so that the
// policy decides.
inline constexpr std::array<std::string_view, 2> kScriptCasts{"_autocast_to_full_precision",
                                                              "_autocast_to_reduced_precision"};

// Operators that LibTorch refuses for arguments of two floating dtypes. A model with 16-bit weights
// may pass fp32 as one of them: a grid, or the values of index_put or scatter_add. Such calls are
// computed in fp32.
inline constexpr std::array<std::string_view, 9> kWidensMixed{
    "bilinear",  "dot",         "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "index_copy",
    "index_put", "scatter_add", "vdot"};
// In a model with 16-bit weights, and under the preset semitone on a CPU, these operators compute in
// fp32 and return fp32, because LibTorch has no 16-bit CPU kernels for them, or wrong ones
// (matrix_exp in LibTorch 2.11). The operators of presets::without_16bit_kernels() are treated in the
// same way.
inline constexpr std::array<std::string_view, 16> kLack16Bits{"complex",
                                                              "det",
                                                              "istft",
                                                              "linalg_det",
                                                              "linalg_lu",
                                                              "linalg_lu_factor",
                                                              "linalg_lu_solve",
                                                              "linalg_matrix_exp",
                                                              "linalg_matrix_norm",
                                                              "linalg_pinv",
                                                              "linalg_slogdet",
                                                              "linalg_solve_triangular",
                                                              "logdet",
                                                              "matrix_exp",
                                                              "nuclear_norm",
                                                              "slogdet"};
// Operators that check for a single dtype before they reach the matrix products inside them.
// (lstm.input and lstm.data; gru_cell; …)
inline constexpr std::array<std::string_view, 8> kRecurrent{
    "gru",      "gru_cell",      "lstm",     "lstm_cell",
    "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell"};
// Operators that LibTorch refuses for fp32 with 16-bit weights. In a model with 16-bit weights, such
// an input is cast to their dtype. (Normalisation layers accept a 16-bit input with fp32 weights.)
inline constexpr std::array<std::string_view, 6> kFollowWeights{
    "batch_norm", "group_norm", "instance_norm", "layer_norm", "prelu", "rms_norm"};

// Whether an operator, or an overload of it, is in a list.
inline bool is_one_of(std::string_view op, std::span<const std::string_view> names) {
  return std::any_of(names.begin(), names.end(), [op](std::string_view name) {
    return op.starts_with(name) && (op.size() == name.size() || op[name.size()] == '.');
  });
}

}  // namespace semitone::amp
