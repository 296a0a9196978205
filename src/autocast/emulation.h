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

  // conv1d, conv2d, conv3d, or `convolution`, which may also be grouped or transposed.
  bool is_convolution() const { return kind == OperatorKind::convolution; }
  // One of these, or conv_transpose1d, 2d or 3d.
  bool convolves() const {
    return is_convolution() || kind == OperatorKind::transposed_convolution;
  }
};

std::optional<MatrixProduct> matrix_product(const c10::OperatorHandle& op);

// All matrix products of this LibTorch, or the convolutions only.
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

}  // namespace semitone::amp
