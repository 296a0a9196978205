// Which 16-bit kernels processors have, told from what CPUID says and the limit that oneDNN was
// given: without the processors.

#include "src/core/native_kernels.h"

#include "src/core/env.h"
#include "tests/support/processors.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace semitone {
namespace {

using enum InstructionSet;

TEST(InstructionSets, AreWhatTheProcessorHas) {
  EXPECT_EQ(effective_instruction_set(kNehalem, ""), baseline);
  EXPECT_EQ(effective_instruction_set(kHaswell, ""), avx2);
  EXPECT_EQ(effective_instruction_set(kAlderLake, ""), avx2);
  EXPECT_EQ(effective_instruction_set(kSierraForest, ""), avx2_vnni_2);
  EXPECT_EQ(effective_instruction_set(kSkylake, ""), avx512);
  EXPECT_EQ(effective_instruction_set(kIceLake, ""), avx512);
  EXPECT_EQ(effective_instruction_set(kZen4, ""), avx512_bf16);
  EXPECT_EQ(effective_instruction_set(kZen5, ""), avx512_bf16);
  EXPECT_EQ(effective_instruction_set(kSapphireRapids, ""), amx);
  EXPECT_EQ(effective_instruction_set(without_amx(kSapphireRapids), ""), avx512_fp16);
  EXPECT_EQ(effective_instruction_set(kGraniteRapids, ""), amx_fp16);
  EXPECT_EQ(effective_instruction_set(without_amx(kGraniteRapids), ""), avx512_fp16);
  EXPECT_EQ(effective_instruction_set(kDiamondRapids, ""), amx_fp16);
}

TEST(InstructionSets, AreNoMoreThanOneDnnMayUse) {
  struct Case {
    const char* limit;
    InstructionSet on_zen5;
    InstructionSet on_granite_rapids;
  };
  const std::vector<Case> cases{
      {"SSE41", baseline, baseline},
      {"AVX", baseline, baseline},
      {"AVX2", avx2, avx2},
      {"AVX2_VNNI", avx2, avx2},
      {"AVX2_VNNI_2", avx2, avx2},
      {"AVX512_CORE", avx512, avx512},
      {"AVX512_CORE_VNNI", avx512, avx512},
      {"AVX512_CORE_BF16", avx512_bf16, avx512_bf16},
      {"AVX512_CORE_FP16", avx512_bf16, avx512_fp16},
      {"AVX10_1_512", avx512_bf16, avx512_fp16},
      {"AVX512_CORE_AMX", avx512_bf16, amx},
      {"AVX10_1_512_AMX", avx512_bf16, amx},
      {"AVX512_CORE_AMX_FP16", avx512_bf16, amx_fp16},
      {"AVX10_1_512_AMX_FP16", avx512_bf16, amx_fp16},
      {"AVX10_2_512", avx512_bf16, amx_fp16},
      {"DEFAULT", avx512_bf16, amx_fp16},
      {"avx512_core_bf16", avx512_bf16, avx512_bf16},
      {"Avx2", avx2, avx2},
      {"AVX512", avx512_bf16, amx_fp16},  // no name of oneDNN's, and no limit to it
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.limit);
    EXPECT_EQ(effective_instruction_set(kZen5, one.limit), one.on_zen5);
    EXPECT_EQ(effective_instruction_set(kGraniteRapids, one.limit), one.on_granite_rapids);
  }
  // A branch of its own: a processor that has both gets it by name alone.
  EXPECT_EQ(effective_instruction_set(kDiamondRapids, "AVX2_VNNI_2"), avx2_vnni_2);
  EXPECT_EQ(effective_instruction_set(kSierraForest, "AVX2"), avx2);
  EXPECT_EQ(effective_instruction_set(kSierraForest, "AVX512_CORE"), avx2);
}

const std::vector<OperatorKind> kKinds{OperatorKind::product,
                                       OperatorKind::convolution,
                                       OperatorKind::grouped_convolution,
                                       OperatorKind::transposed_convolution,
                                       OperatorKind::recurrent,
                                       OperatorKind::attention};
const std::vector<Pass> kPasses{Pass::forward, Pass::backward_data, Pass::backward_weights};

TEST(NativeKernels, OfBf16ComeTogetherWithItsInstructions) {
  for (const auto set : {baseline, avx2, avx2_vnni_2, avx512})
    EXPECT_TRUE(native_kernels(set, torch::kBFloat16).is_none()) << name_of(set);
  for (const auto set : {avx512_bf16, avx512_fp16, amx, amx_fp16})
    EXPECT_TRUE(native_kernels(set, torch::kBFloat16).is_all()) << name_of(set);
}

TEST(NativeKernels, OfFp16ComeOneByOne) {
  for (const auto set : {baseline, avx2, avx2_vnni_2, avx512, avx512_bf16})
    EXPECT_TRUE(native_kernels(set, torch::kHalf).is_none()) << name_of(set);
  for (const auto set : {avx512_fp16, amx, amx_fp16}) {
    SCOPED_TRACE(name_of(set));
    const NativeKernels kernels = native_kernels(set, torch::kHalf);
    for (const OperatorKind kind : kKinds) {
      for (const Pass pass : kPasses) {
        const bool has_convolution = kind == OperatorKind::convolution &&
                                     (pass != Pass::backward_weights || set == amx_fp16);
        EXPECT_EQ(kernels.has(kind, pass), kind == OperatorKind::product || has_convolution)
            << name_of(kind) << ", pass " << static_cast<int>(pass);
      }
    }
    EXPECT_TRUE(kernels.trains(OperatorKind::product));
    EXPECT_EQ(kernels.trains(OperatorKind::convolution), set == amx_fp16);
  }
}

TEST(NativeKernels, OfThisMachineFollowTheLimit) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const NativeKernels kernels = native_kernels(torch::kCPU, dtype);
    EXPECT_TRUE(kernels == native_kernels(effective_instruction_set(), dtype));
    for (const OperatorKind kind : kKinds) {
      EXPECT_EQ(trains_natively(torch::kCPU, dtype, kind), kernels.trains(kind));
      for (const Pass pass : kPasses)
        EXPECT_EQ(has_native_kernel(torch::kCPU, dtype, kind, pass), kernels.has(kind, pass));
    }
  }
  const auto limit = env::get(env::kOneDnnMaxIsa);
  EXPECT_EQ(effective_instruction_set(),
            effective_instruction_set(read_cpu_features(), limit.value_or("")));
}

TEST(NativeKernels, AreASetOfKindsAndPasses) {
  const auto one = NativeKernels::none().with(OperatorKind::attention, {Pass::backward_data});
  EXPECT_TRUE(one.has(OperatorKind::attention, Pass::backward_data));
  EXPECT_FALSE(one.has(OperatorKind::attention, Pass::forward));
  EXPECT_FALSE(one.trains(OperatorKind::attention));
  EXPECT_FALSE(one.is_none());
  NativeKernels every = NativeKernels::none();
  for (const OperatorKind kind : kKinds) {
    EXPECT_FALSE(every.is_all());
    every = every.with(kind);
    EXPECT_TRUE(every.trains(kind));
  }
  EXPECT_TRUE(every.is_all());
}

TEST(NativeKernels, AreDescribedInWords) {
  EXPECT_EQ(describe(NativeKernels::all()), "native");
  EXPECT_EQ(describe(NativeKernels::none()), "emulated");
  EXPECT_EQ(describe(native_kernels(amx, torch::kHalf)),
            "products native, convolutions emulated, LSTM emulated, attention emulated");
  EXPECT_EQ(describe(native_kernels(amx_fp16, torch::kHalf)),
            "products native, convolutions native, grouped convolutions emulated, transposed "
            "convolutions emulated, LSTM emulated, attention emulated");
}

}  // namespace
}  // namespace semitone
