// CPUID features of x86-64 processors by name, for tests that ask about processors other than the
// one they run on.

#pragma once

#include "src/core/native_kernels.h"

namespace semitone {

inline constexpr CpuFeatures kNehalem{};
inline constexpr CpuFeatures kHaswell{.avx2 = true};
inline constexpr CpuFeatures kAlderLake{.avx2 = true, .avx_vnni = true};
inline constexpr CpuFeatures kSierraForest{
    .avx2 = true, .avx_vnni = true, .avx_vnni_int8 = true, .avx_ne_convert = true};
inline constexpr CpuFeatures kSkylake{.avx2 = true, .avx512 = true};
inline constexpr CpuFeatures kIceLake{.avx2 = true, .avx512 = true, .avx512_vnni = true};
inline constexpr CpuFeatures kZen4{
    .avx2 = true, .avx512 = true, .avx512_vnni = true, .avx512_bf16 = true};
inline constexpr CpuFeatures kZen5{
    .avx2 = true, .avx_vnni = true, .avx512 = true, .avx512_vnni = true, .avx512_bf16 = true};
inline constexpr CpuFeatures kSapphireRapids{.avx2 = true,
                                             .avx_vnni = true,
                                             .avx512 = true,
                                             .avx512_vnni = true,
                                             .avx512_bf16 = true,
                                             .avx512_fp16 = true,
                                             .amx = true};
constexpr CpuFeatures without_amx(CpuFeatures cpu) {
  cpu.amx = false;
  return cpu;
}
inline constexpr CpuFeatures kGraniteRapids{.avx2 = true,
                                            .avx_vnni = true,
                                            .avx512 = true,
                                            .avx512_vnni = true,
                                            .avx512_bf16 = true,
                                            .avx512_fp16 = true,
                                            .amx = true,
                                            .amx_fp16 = true};
// Every feature that CpuFeatures knows.
inline constexpr CpuFeatures kDiamondRapids{.avx2 = true,
                                            .avx_vnni = true,
                                            .avx_vnni_int8 = true,
                                            .avx_ne_convert = true,
                                            .avx512 = true,
                                            .avx512_vnni = true,
                                            .avx512_bf16 = true,
                                            .avx512_fp16 = true,
                                            .amx = true,
                                            .amx_fp16 = true};

}  // namespace semitone
