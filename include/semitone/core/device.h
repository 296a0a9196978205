#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace semitone {

/// Returns CUDA if LibTorch supports it and a GPU is present, otherwise the CPU.
c10::DeviceType default_device();

/// Returns the 16-bit dtype that mixed precision uses on a device by default. On a CPU it is bf16:
/// gradients need no scaling, since bf16 has fp32's range, and more CPUs have instructions for bf16
/// than for fp16. On every other device it is fp16.
c10::ScalarType default_16bit_dtype(c10::DeviceType device);

/// The kinds of operators that processors accelerate in 16 bits. Operators of one kind share
/// kernels.
enum class OperatorKind : std::uint8_t {
  product,                 ///< mm, addmm, bmm, linear, einsum …; their gradients are products too
  convolution,             ///< conv1d, conv2d, conv3d with one group of channels
  grouped_convolution,     ///< with several groups, most often depthwise ones
  transposed_convolution,  ///< conv_transpose1d, 2d, 3d
  recurrent,               ///< lstm, which oneDNN computes as a whole; other cells are products
  attention,               ///< scaled_dot_product_attention
};
inline constexpr int kOperatorKinds = 6;

/// "products", "convolutions", "grouped convolutions", "transposed convolutions", "LSTM",
/// "attention".
std::string_view name_of(OperatorKind kind);

/// The directions of training. Each has kernels of its own.
enum class Pass : std::uint8_t {
  forward,
  backward_data,     ///< the gradient of the operator's input
  backward_weights,  ///< the gradient of its weights and bias
};

/// Returns whether LibTorch has a kernel in this 16-bit dtype that is about as fast as fp32's, or
/// faster. Without such a kernel the operator takes 10 to 500 times as long as in fp32, or raises
/// an error. Semitone then computes the same numbers through fp32: see Emulation in
/// autocast/cast_policy.h.
///
/// On a CPU LibTorch leaves these operators to oneDNN, which chooses a kernel by instruction set.
/// The table in src/core/native_kernels.cpp restates the kernel lists of oneDNN 3.10, the version
/// in LibTorch 2.11:
///
/// | instruction set | examples | bf16 | fp16 |
/// |---|---|---|---|
/// | SSE4.1, AVX2, AVX-512 | Haswell, Skylake-X, Ice Lake | none | none |
/// | AVX2-VNNI-2 | Sierra Forest, Arrow Lake | none | none |
/// | AVX512-BF16 | Cooper Lake, Zen 4, Zen 5 | all | none |
/// | AVX512-FP16, with AMX-BF16 or without | Sapphire Rapids, Emerald Rapids | all | products; convolutions but for the gradient of their weights |
/// | AMX-FP16 | Granite Rapids | all | products; convolutions |
///
/// The instruction set is the processor's, limited by ONEDNN_MAX_CPU_ISA. The function does not
/// time anything: numbers depend on the answer through the order of summation, so the answer must
/// be the same on every rank, in every run, and on a busy machine. `semitone ops --speed` prints
/// measured times next to the answer for each kind.
///
/// Always true for devices other than the CPU, and for fp32 and fp64.
bool has_native_kernel(c10::DeviceType device, c10::ScalarType dtype, OperatorKind kind,
                       Pass pass = Pass::forward);

/// Returns whether has_native_kernel is true in every direction, so that training uses native
/// kernels.
bool trains_natively(c10::DeviceType device, c10::ScalarType dtype, OperatorKind kind);

/// Describes which kinds train natively: "native", "emulated", or "products native, convolutions
/// emulated, LSTM emulated, attention emulated". Kinds of convolutions are listed separately where
/// they differ. For a GPU the text is "native", or says that the dtype is slower than fp32 at this
/// compute capability: fp16 on GeForce 10 (6.1) and before 5.3, bf16 before 8.0.
std::string describe_16bit(c10::DeviceType device, c10::ScalarType dtype);

/// Describes the machine in one line, for tables and logs: "CPU, 2 threads, AVX512, oneDNN up to
/// AVX512-BF16; bf16 native; fp16 emulated".
std::string describe_device(c10::DeviceType device);

}  // namespace semitone
