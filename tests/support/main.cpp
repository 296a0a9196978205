// Runs tests at the instruction sets that the environment allows. ATEN_CPU_CAPABILITY limits
// LibTorch's kernels, and ONEDNN_MAX_CPU_ISA oneDNN's. This program limits Semitone's kernels,
// which Highway selects, to oneDNN's instruction set, and reports the result.

#include "src/core/env.h"
#include "src/core/native_kernels.h"
#include "tests/support/processors.h"

#include <ATen/Version.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>

namespace semitone {
namespace {

// Highway's name for the best of its targets that is no better than a set. Lower bits are better.
std::int64_t highway_target(InstructionSet set) {
  switch (set) {
    case InstructionSet::baseline:
      return HWY_SSE4;
    case InstructionSet::avx2:
    case InstructionSet::avx2_vnni_2:
      return HWY_AVX2;
    case InstructionSet::avx512:
      return HWY_AVX3;
    default:
      return 1;
  }
}

// LibTorch does not compare this variable with the processor: instructions that are missing would
// end the process.
void limit_libtorch(InstructionSet set) {
  constexpr auto kVariable = "ATEN_CPU_CAPABILITY";
  const char* const allowed = std::getenv(kVariable);
  if (allowed == nullptr || std::string_view(allowed) != "avx512" || set >= InstructionSet::avx512)
    return;
  ::setenv(kVariable, set == InstructionSet::baseline ? "default" : "avx2", 1);
}

void limit_instruction_sets() {
  const InstructionSet set = effective_instruction_set();
  limit_libtorch(set);
  hwy::DisableTargets(highway_target(set) - 1);
  const std::int64_t targets = hwy::SupportedTargets();
  std::cout << "Instruction sets: LibTorch " << at::get_cpu_capability() << ", oneDNN "
            << name_of(set) << ", Semitone " << hwy::TargetName(targets & -targets) << '\n';
  const std::string limit = env::get(env::kOneDnnMaxIsa).value_or("");
  const InstructionSet allowed = effective_instruction_set(kDiamondRapids, limit);
  if (!limit.empty() && allowed != set) {
    std::cout << "Up to " << name_of(allowed) << " was allowed; this processor has no more than "
              << name_of(set) << ", so this is the same run as without a limit\n";
  }
}

}  // namespace
}  // namespace semitone

int main(int argc, char** argv) {
  semitone::limit_instruction_sets();  // first: the parameters of tests may be tensors
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
