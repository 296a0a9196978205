#pragma once

#include "src/core/native_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <span>
#include <vector>

// Which operators multiply matrices, and when they are computed through fp32 (autocast/cast_action.h,
// Emulation).
namespace semitone::amp {

struct MatrixProduct {
  OperatorKind kind;
  // Made of other operators: einsum, linear, lstm … If this operator is not cast as a whole, each
  // of those is emulated.
  bool is_composite = false;
  // A recurrent network that LibTorch computes step by step (has_small_steps): all except an LSTM
  // of padded sequences.
  bool has_steps = false;

  // Whether the weight's shape matters (convolves_wrongly).
  bool is_convolution() const { return kind == OperatorKind::convolution; }
};

std::optional<MatrixProduct> matrix_product(const c10::OperatorHandle& op);

// All matrix products of this LibTorch, or the convolutions only: conv1d … and `convolution`, which
// may also be grouped or transposed.
std::vector<c10::OperatorHandle> matrix_products();
std::vector<c10::OperatorHandle> convolutions();

// Whether there are kernels for everything that a call computes: its result and, if it is recorded,
// the gradients that are needed. The arguments are those before any cast.
bool runs_natively(const MatrixProduct& product, std::span<const c10::IValue> arguments,
                   const NativeKernels& kernels);

// Whether the steps of a recurrent network (`has_steps`) are faster in fp32 on every processor: a
// 16-bit product has a fixed cost that small products do not recover. With fewer than 32,768
// weights from state to state, cells in bf16 take 1.1 to 3.7 times as long as in fp32; with more,
// 0.4 to 0.9 times (LSTM, GRU and RNN of 32 to 512 units, batches of 32, AVX512-BF16 on Zen 5).
bool has_small_steps(std::span<const c10::IValue> arguments);

// Whether this machine's LibTorch computes a 16-bit convolution with this weight wrongly. On
// processors with AMX, the oneDNN of LibTorch 2.11 to 2.15 returns garbage if a weight has fewer
// than 16 input channels per group, an even number of them, and channels * kernel width is a
// multiple of 32 above 32 (for example 8 channels and width 8), for any stride and padding. An
// example is a patch embedding of 4-channel latents by 16. Backward is right. A comparison of bf16
// and fp16 with fp32 over 11,000 shapes found this. The first call tries one such convolution, so
// that nothing changes for a repaired LibTorch.
bool convolves_wrongly(const at::Tensor& weight, c10::ScalarType dtype);

}  // namespace semitone::amp
