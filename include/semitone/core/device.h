#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace semitone {

/// CUDA where LibTorch has it and a GPU is there, else the CPU.
c10::DeviceType default_device();

/// The 16-bit dtype that mixed precision uses on a device unless told otherwise: bf16 on a CPU (it
/// has fp32's range, so nothing needs scaling, and it is what CPUs speed up first), fp16 on every
/// other device.
c10::ScalarType default_16bit_dtype(c10::DeviceType device);

/// The operators that processors speed up in 16 bits, by what their kernels have in common.
enum class OperatorKind : std::uint8_t {
  product,                 ///< mm, addmm, bmm, linear, einsum …; gradients are products too
  convolution,             ///< conv1d, conv2d, conv3d of all channels together
  grouped_convolution,     ///< of groups of channels, depthwise ones above all
  transposed_convolution,  ///< conv_transpose1d, 2d, 3d
  recurrent,               ///< lstm, which oneDNN computes as a whole; other cells are products
  attention,               ///< scaled_dot_product_attention
};
inline constexpr int kOperatorKinds = 6;

/// "products", "convolutions", "grouped convolutions", "transposed convolutions", "LSTM",
/// "attention".
std::string_view name_of(OperatorKind kind);

/// The directions that have kernels of their own.
enum class Pass : std::uint8_t {
  forward,
  backward_data,     ///< the gradient of what the operator is applied to
  backward_weights,  ///< that of its weights and bias
};

/// Whether LibTorch has a kernel in this 16-bit dtype that is about as fast as fp32's, or faster.
/// Where it has none, its operator takes 10 to 500 times as long as in fp32 (or raises), and
/// Semitone computes the same numbers through fp32: amp/cast_policy.h, Emulation.
///
/// On a CPU LibTorch leaves these operators to oneDNN, which chooses a kernel by instruction set;
/// which there are is known from its lists (3.10, that of LibTorch 2.11), and stands as a table in
/// src/core/native_kernels.cpp:
///
/// | instruction set | examples | bf16 | fp16 |
/// |---|---|---|---|
/// | SSE4.1, AVX2, AVX-512 | Haswell, Skylake-X, Ice Lake | none | none |
/// | AVX2-VNNI-2 | Sierra Forest, Arrow Lake | none | none |
/// | AVX512-BF16 | Cooper Lake, Zen 4, Zen 5 | all | none |
/// | AVX512-FP16, with AMX-BF16 or without | Sapphire Rapids, Emerald Rapids | all | products; convolutions but for the gradient of their weights |
/// | AMX-FP16 | Granite Rapids | all | products; convolutions |
///
/// The instruction set is the processor's, and no more than ONEDNN_MAX_CPU_ISA allows. Nothing is
/// timed: numbers depend on the answer, by the order of summation, so it must be the same on every
/// rank, in every run, and on a machine that is busy. `semitone ops --speed` measures each kind
/// beside the answer.
///
/// Always true for devices other than the CPU, and for fp32 and fp64.
bool has_native_kernel(c10::DeviceType device, c10::ScalarType dtype, OperatorKind kind,
                       Pass pass = Pass::forward);

/// Whether has_native_kernel in every direction: whether training uses the dtype's own kernels.
bool trains_natively(c10::DeviceType device, c10::ScalarType dtype, OperatorKind kind);

/// Which kinds train natively, in words: "native", "emulated", or "products native, convolutions
/// emulated, LSTM emulated, attention emulated" (kinds of convolutions are told apart where they
/// differ). Of a GPU: "native", or that it is slower than fp32 there, by its compute capability: fp16
/// on GeForce 10 (6.1) and before 5.3, bf16 before 8.0.
std::string describe_16bit(c10::DeviceType device, c10::ScalarType dtype);

/// One line about the machine for tables and logs: "CPU, 2 threads, AVX512, oneDNN up to
/// AVX512-BF16; bf16 native; fp16 emulated".
std::string describe_device(c10::DeviceType device);

}  // namespace semitone
