#include "src/core/native_kernels.h"

#include "src/core/env.h"

#include <ATen/core/dispatch/Dispatcher.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <utility>
#include <vector>

namespace semitone {
namespace {

// LibTorch queries oneDNN about the processor and exposes the answer as an operator without
// arguments. False: LibTorch's own loops run, and oneDNN is not called.
bool libtorch_uses_onednn(c10::ScalarType dtype) {
  const char* const name = dtype == at::kHalf ? "mkldnn::_is_mkldnn_fp16_supported"
                                              : "mkldnn::_is_mkldnn_bf16_supported";
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  if (!op.has_value()) return false;  // a LibTorch without oneDNN
  torch::jit::Stack stack;
  op->callBoxed(stack);
  return stack.at(0).toBool();
}

#if defined(__x86_64__)
// Whether Linux would let this process use AMX's tile data, which must be requested. oneDNN
// requests it.
bool system_grants_amx() {
  constexpr long kGetSupported = 0x1021;  // ARCH_GET_XCOMP_SUPP
  constexpr std::uint64_t kTileData = 1U << 18;
  std::uint64_t supported = 0;
  return syscall(SYS_arch_prctl, kGetSupported, &supported) == 0 && (supported & kTileData) != 0;
}
#endif

// The limit on oneDNN, by the names of ONEDNN_MAX_CPU_ISA.
struct Limit {
  InstructionSet set;
  bool vnni_2;  // AVX2-VNNI-2 is a branch of its own: AVX-512 without AVX10.2 does not have it
};

const std::map<std::string, Limit, std::less<>>& limits() {
  using enum InstructionSet;
  static const std::map<std::string, Limit, std::less<>> kLimits{
      {"sse41", {baseline, false}},
      {"avx", {baseline, false}},
      {"avx2", {avx2, false}},
      {"avx2_vnni", {avx2, false}},
      {"avx2_vnni_2", {avx2, true}},
      {"avx512_core", {avx512, false}},
      {"avx512_core_vnni", {avx512, false}},
      {"avx512_core_bf16", {avx512_bf16, false}},
      {"avx512_core_fp16", {avx512_fp16, false}},
      {"avx10_1_512", {avx512_fp16, false}},
      {"avx512_core_amx", {amx, false}},
      {"avx10_1_512_amx", {amx, false}},
      {"avx512_core_amx_fp16", {amx_fp16, false}},
      {"avx10_1_512_amx_fp16", {amx_fp16, false}},
      // The names of AVX10.2 allow everything that matters here.
  };
  return kLimits;
}

std::string lower_case(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

}  // namespace

std::string_view name_of(InstructionSet set) {
  constexpr std::string_view kBaseline = kIsX86 ? "SSE4.1" : "generic";
  constexpr std::array<std::string_view, 8> kNames{
      kBaseline, "AVX2", "AVX2-VNNI-2", "AVX-512", "AVX512-BF16", "AVX512-FP16", "AMX", "AMX-FP16"};
  return kNames.at(static_cast<std::size_t>(set));
}

CpuFeatures read_cpu_features() {
  CpuFeatures cpu;
#if defined(__x86_64__)
  // These two also check whether the system saves the registers.
  __builtin_cpu_init();
  cpu.avx2 = __builtin_cpu_supports("avx2");
  cpu.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const auto bit = [](unsigned word, unsigned number) { return ((word >> number) & 1U) != 0; };
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return cpu;
  cpu.avx512_vnni = bit(ecx, 11);
  cpu.avx512_fp16 = bit(edx, 23);
  constexpr unsigned kAmx[] = {22, 24, 25};  // BF16, TILE, INT8
  cpu.amx = std::all_of(std::begin(kAmx), std::end(kAmx),
                        [&](unsigned number) { return bit(edx, number); }) &&
            system_grants_amx();
  const unsigned subleaves = eax;
  if (subleaves < 1 || __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0) return cpu;
  cpu.avx_vnni = bit(eax, 4);
  cpu.avx512_bf16 = bit(eax, 5);
  cpu.amx_fp16 = bit(eax, 21);
  cpu.avx_vnni_int8 = bit(edx, 4);
  cpu.avx_ne_convert = bit(edx, 5);
#endif
  return cpu;
}

InstructionSet effective_instruction_set(const CpuFeatures& cpu, std::string_view limit) {
  using enum InstructionSet;
  const auto found = limits().find(lower_case(limit));
  const Limit allowed = found == limits().end() ? Limit{amx_fp16, true} : found->second;
  // From the best downwards, each with its prerequisites.
  const bool has_bf16 = cpu.avx2 && cpu.avx512 && cpu.avx512_vnni && cpu.avx512_bf16;
  const bool has_fp16 = has_bf16 && cpu.avx512_fp16 && cpu.avx_vnni;
  const bool has_amx = has_fp16 && cpu.amx;
  if (has_amx && cpu.amx_fp16 && allowed.set >= amx_fp16) return amx_fp16;
  if (has_amx && allowed.set >= amx) return amx;
  if (has_fp16 && allowed.set >= avx512_fp16) return avx512_fp16;
  if (has_bf16 && allowed.set >= avx512_bf16) return avx512_bf16;
  if (cpu.avx2 && cpu.avx512 && allowed.set >= avx512) return avx512;
  if (cpu.avx2 && cpu.avx_vnni && cpu.avx_vnni_int8 && cpu.avx_ne_convert && allowed.vnni_2)
    return avx2_vnni_2;
  return cpu.avx2 && allowed.set >= avx2 ? avx2 : baseline;
}

InstructionSet effective_instruction_set() {
  static const InstructionSet kSet = [] {
    const auto limit = env::get(env::kOneDnnMaxIsa);
    const auto older = env::get(env::kDnnlMaxIsa);
    return effective_instruction_set(read_cpu_features(), limit.value_or(older.value_or("")));
  }();
  return kSet;
}

// From oneDNN 3.10's lists of implementations (cpu_convolution_list.cpp,
// cpu_deconvolution_list.cpp, cpu_matmul_list.cpp, rnn/ref_rnn.cpp) and their conditions.
// Everything else ends in a reference loop, `ref:any` in its log, which takes 10 to 150 times as
// long as fp32, or in an error.
NativeKernels native_kernels(InstructionSet set, c10::ScalarType dtype) {
  using enum InstructionSet;
  using enum OperatorKind;
  // Arm has `baseline`, and so no native kernels. LibTorch 2.11 has some there (oneDNN 3.10 with the
  // Arm Compute Library; seen in QEMU), but none for the gradients of a convolution. Products round
  // the sum of every 512 terms to the dtype: with 16384 terms the error is 3.7 times that of one
  // rounding in bf16, 2.8 times in fp16. An fp16 convolution without SVE sums in fp16.
  if (dtype == at::kBFloat16) {
    // Below AVX512-BF16 products consist of fp32 instructions and conversions: 45 GF/s against 124
    // in fp32 (512^3, two threads, AVX512_CORE on Zen 5), and AVX2-VNNI-2 has no gradient of a
    // convolution's weights.
    return set >= avx512_bf16 ? NativeKernels::all() : NativeKernels::none();
  }
  if (set < avx512_fp16) return NativeKernels::none();
  // Sums are fp32 here as well: AVX512-FP16 converts and uses fp32 instructions, so products take
  // as long as in fp32. Only AMX-FP16 has a kernel for the gradient of a convolution's weights. Not
  // native in fp16 anywhere:
  // - LSTM: oneDNN refuses to train one ("f16 training not supported"), on every processor.
  // - depthwise convolutions: no gradient has a kernel. Other groups of channels: only where their
  //   sizes are multiples of 16.
  // - transposed convolutions: oneDNN's gradients are made of others, of which some are missing.
  // - attention: LibTorch's own loops around small products, 4 times as slow as fp32 (Sapphire
  //   Rapids).
  const NativeKernels products = NativeKernels::none().with(product);
  return set >= amx_fp16 ? products.with(convolution)
                         : products.with(convolution, {Pass::forward, Pass::backward_data});
}

NativeKernels native_kernels(c10::DeviceType device, c10::ScalarType dtype) {
  if (device != c10::DeviceType::CPU || (dtype != at::kHalf && dtype != at::kBFloat16))
    return NativeKernels::all();
  static const auto kernels = [](c10::ScalarType of) {
    if (!libtorch_uses_onednn(of)) return NativeKernels::none();
    return native_kernels(effective_instruction_set(), of);
  };
  static const NativeKernels kFp16 = kernels(at::kHalf);
  static const NativeKernels kBf16 = kernels(at::kBFloat16);
  return dtype == at::kHalf ? kFp16 : kBf16;
}

std::string describe(const NativeKernels& kernels) {
  using enum OperatorKind;
  const auto word = [&](OperatorKind kind) {
    return kernels.trains(kind) ? " native" : " emulated";
  };
  std::vector<OperatorKind> kinds{product, convolution};
  // Listed separately from other convolutions only if they differ.
  for (const OperatorKind kind : {grouped_convolution, transposed_convolution}) {
    if (kernels.trains(kind) != kernels.trains(convolution)) kinds.push_back(kind);
  }
  kinds.insert(kinds.end(), {recurrent, attention});
  const bool alike = std::all_of(kinds.begin(), kinds.end(), [&](OperatorKind kind) {
    return kernels.trains(kind) == kernels.trains(product);
  });
  if (alike) return kernels.trains(product) ? "native" : "emulated";
  std::string text;
  for (const OperatorKind kind : kinds)
    text.append(text.empty() ? "" : ", ").append(name_of(kind)).append(word(kind));
  return text;
}

std::string_view name_of(OperatorKind kind) {
  constexpr std::array<std::string_view, kOperatorKinds> kNames{
      "products", "convolutions", "grouped convolutions", "transposed convolutions",
      "LSTM",     "attention"};
  return kNames.at(static_cast<std::size_t>(kind));
}

bool has_native_kernel(c10::DeviceType device, c10::ScalarType dtype, OperatorKind kind,
                       Pass pass) {
  return native_kernels(device, dtype).has(kind, pass);
}

bool trains_natively(c10::DeviceType device, c10::ScalarType dtype, OperatorKind kind) {
  return native_kernels(device, dtype).trains(kind);
}

}  // namespace semitone
