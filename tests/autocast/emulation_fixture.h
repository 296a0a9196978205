#pragma once

#include "semitone/autocast/autocast.h"
#include "src/autocast/regions.h"
#include "src/core/native_kernels.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

// Policies that emulate, and regions as on other processors.
namespace semitone::amp::emulation_test {

using Tensors = std::vector<at::Tensor>;

inline constexpr auto kCpu = torch::kCPU;
inline constexpr auto kFp32 = torch::kFloat;
inline constexpr auto kFp16 = torch::kHalf;
inline constexpr auto kBf16 = torch::kBFloat16;

inline CastPolicy semitone(c10::ScalarType dtype, Emulation emulation = Emulation::always) {
  return CastPolicy::semitone({kCpu, dtype}).emulation(emulation);
}
inline CastPolicy none(c10::ScalarType dtype, Emulation emulation = Emulation::always) {
  return CastPolicy::none({kCpu, dtype}).emulation(emulation);
}

inline at::Tensor rounded(const at::Tensor& tensor, c10::ScalarType dtype) {
  return tensor.detach().to(dtype).to(kFp32);
}

// A region of a policy; another processor decides which kernels Emulation uses.
class Region {
 public:
  explicit Region(const CastPolicy& policy, std::optional<InstructionSet> processor = {})
      : region_(policy) {
    if (processor.has_value()) other_.emplace(kAutocastState, on(*processor));
  }

 private:
  static std::shared_ptr<Regions> on(InstructionSet processor) {
    auto regions = std::make_shared<Regions>(*Regions::current());
    for (Regions::Region& region : regions->innermost) {
      auto policy = std::make_shared<CompiledPolicy>(*region.policy);
      policy->set_native(native_kernels(processor, kFp16), native_kernels(processor, kBf16));
      region.policy = std::move(policy);
    }
    return regions;
  }

  Autocast region_;
  std::optional<c10::DebugInfoGuard> other_;
};

}  // namespace semitone::amp::emulation_test
