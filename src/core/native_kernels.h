#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

// The 16-bit kernels that LibTorch has on this machine, and the same as functions of the processor's
// features and of the limit on oneDNN: tests need no particular hardware.
namespace semitone {

// The kinds of operators that processors accelerate in 16 bits. Operators of one kind share
// kernels.
enum class OperatorKind : std::uint8_t {
  product,                 // mm, addmm, bmm, linear, einsum …; their gradients are products too
  convolution,             // conv1d, conv2d, conv3d with one group of channels
  grouped_convolution,     // with several groups, most often depthwise ones
  transposed_convolution,  // conv_transpose1d, 2d, 3d
  recurrent,               // lstm, which oneDNN computes as a whole; other cells are products
  attention,               // scaled_dot_product_attention
};
inline constexpr int kOperatorKinds = 6;

// "products", "convolutions", "grouped convolutions", "transposed convolutions", "LSTM",
// "attention".
std::string_view name_of(OperatorKind kind);

// The directions of training. Each has kernels of its own.
enum class Pass : std::uint8_t {
  forward,
  backward_data,     // the gradient of the operator's input
  backward_weights,  // the gradient of its weights and bias
};

// Returns whether LibTorch has a kernel in this 16-bit dtype that is about as fast as fp32's, or
// faster. Without such a kernel the operator takes 10 to 500 times as long as in fp32, or raises
// an error. Semitone then computes the same numbers through fp32: see Emulation in
// autocast/cast_policy.h.
//
// On a CPU LibTorch leaves these operators to oneDNN, which chooses a kernel by instruction set.
// The table in native_kernels.cpp restates the kernel lists of oneDNN 3.10, the version
// in LibTorch 2.11:
//
// | instruction set | examples | bf16 | fp16 |
// |---|---|---|---|
// | SSE4.1, AVX2, AVX-512 | Haswell, Skylake-X, Ice Lake | none | none |
// | AVX2-VNNI-2 | Sierra Forest, Arrow Lake | none | none |
// | AVX512-BF16 | Cooper Lake, Zen 4, Zen 5 | all | none |
// | AVX512-FP16, with AMX-BF16 or without | Sapphire Rapids, Emerald Rapids | all | products; convolutions but for the gradient of their weights |
// | AMX-FP16 | Granite Rapids | all | products; convolutions |
// | not x86 | Arm | none | none |
//
// The instruction set is the processor's, limited by ONEDNN_MAX_CPU_ISA. The function does not
// time anything: numbers depend on the answer through the order of summation, so the answer must
// be the same on every rank, in every run, and on a busy machine. `semitone ops --speed` prints
// measured times next to the answer for each kind.
//
// Always true for devices other than the CPU, and for fp32 and fp64.
bool has_native_kernel(c10::DeviceType device, c10::ScalarType dtype, OperatorKind kind,
                       Pass pass = Pass::forward);

// Returns whether has_native_kernel is true in every direction, so that training uses native
// kernels.
bool trains_natively(c10::DeviceType device, c10::ScalarType dtype, OperatorKind kind);

// The instruction sets between which oneDNN's 16-bit kernels differ. Each includes those above it,
// except that AVX2-VNNI-2 is a separate branch.
enum class InstructionSet : std::uint8_t {
  baseline,  // SSE4.1 and AVX, and every processor that is not x86
  avx2,
  avx2_vnni_2,  // with AVX-VNNI-INT8 and AVX-NE-CONVERT
  avx512,       // F, BW, VL, DQ
  avx512_bf16,
  avx512_fp16,
  amx,  // AMX-BF16 and AMX-INT8, with AVX512-FP16
  amx_fp16,
};

#if defined(__x86_64__)
inline constexpr bool kIsX86 = true;
#else
inline constexpr bool kIsX86 = false;
#endif

// "SSE4.1" ("generic" if the processor is not x86), "AVX2", "AVX2-VNNI-2", "AVX-512",
// "AVX512-BF16", "AVX512-FP16", "AMX", "AMX-FP16".
std::string_view name_of(InstructionSet set);

// The results of CPUID and of the operating system.
struct CpuFeatures {
  bool avx2 = false;
  bool avx_vnni = false;
  bool avx_vnni_int8 = false;
  bool avx_ne_convert = false;
  bool avx512 = false;  // F, BW, VL and DQ
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool avx512_fp16 = false;
  bool amx = false;  // tiles (which the system has to grant), INT8 and BF16
  bool amx_fp16 = false;
};

CpuFeatures read_cpu_features();

// The best instruction set that the processor has and `limit` allows, by oneDNN's rules: case does
// not matter, and an unknown name is no limit.
InstructionSet effective_instruction_set(const CpuFeatures& cpu, std::string_view limit);

// The instruction set of this process. As in oneDNN, the environment is read at the first call:
// ONEDNN_MAX_CPU_ISA, or else DNNL_MAX_CPU_ISA.
InstructionSet effective_instruction_set();

// A set of pairs of an operator kind and a pass: those that have a native kernel.
class NativeKernels {
 public:
  static NativeKernels all() { return NativeKernels((1U << (kOperatorKinds * kPasses)) - 1); }
  static NativeKernels none() { return NativeKernels(0); }

  NativeKernels with(OperatorKind kind, std::initializer_list<Pass> passes) const {
    std::uint32_t bits = bits_;
    for (const Pass pass : passes) bits |= bit(kind, pass);
    return NativeKernels(bits);
  }
  NativeKernels with(OperatorKind kind) const {
    return with(kind, {Pass::forward, Pass::backward_data, Pass::backward_weights});
  }

  bool has(OperatorKind kind, Pass pass) const { return (bits_ & bit(kind, pass)) != 0; }
  bool trains(OperatorKind kind) const {
    return has(kind, Pass::forward) && has(kind, Pass::backward_data) &&
           has(kind, Pass::backward_weights);
  }
  bool is_all() const { return *this == all(); }
  bool is_none() const { return bits_ == 0; }
  bool operator==(const NativeKernels&) const = default;

 private:
  static constexpr int kPasses = 3;
  explicit NativeKernels(std::uint32_t bits) : bits_(bits) {}
  static std::uint32_t bit(OperatorKind kind, Pass pass) {
    return 1U << (static_cast<int>(kind) * kPasses + static_cast<int>(pass));
  }

  std::uint32_t bits_;
};

// The native kernels of an instruction set for fp16 or bf16.
NativeKernels native_kernels(InstructionSet set, c10::ScalarType dtype);

// The kernels of this machine: those of its instruction set that LibTorch uses.
NativeKernels native_kernels(c10::DeviceType device, c10::ScalarType dtype);

// The text that describe_16bit (core/device.h) returns for a CPU with these kernels.
std::string describe(const NativeKernels& kernels);

}  // namespace semitone
