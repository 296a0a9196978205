#pragma once

#include <compare>
#include <optional>
#include <string>

// Queries NVIDIA's driver about the GPUs, without CUDA's headers and without LibTorch, which sees
// no GPU in a program that is not linked to its CUDA libraries.
namespace semitone {

// The number of GPUs that this process may use (CUDA_VISIBLE_DEVICES); 0 without a driver.
int gpu_count();

// The version of a GPU's instructions: 8.0, 9.0 …
struct ComputeCapability {
  int major = 0;
  int minor = 0;

  auto operator<=>(const ComputeCapability&) const = default;
};

// Nothing without a driver, or for an invalid index.
std::optional<ComputeCapability> compute_capability(int gpu);

// Whether fp16 or bf16 products take at most the time of fp32's. fp16: from 5.3 on, where the
// instructions begin, except 6.1 (GeForce 10), which has one 64th of the units; bf16: from 8.0 on,
// before which it is converted to fp32 and back. NVIDIA's CUDA C++ Programming Guide, "Throughput
// of Native Arithmetic Instructions".
bool computes_fp16_fast(ComputeCapability capability);
bool computes_bf16_fast(ComputeCapability capability);

// "native", or what to expect: "slower than float32 on this GPU (compute capability 6.1)".
std::string describe_speed(ComputeCapability capability, bool is_fast);

}  // namespace semitone
