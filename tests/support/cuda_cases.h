#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

// The results of every kernel with tensors on any device, for comparing devices.
namespace semitone::test {

struct CudaCase {
  std::string name;
  // The results, on the CPU. The inputs are always the same.
  std::function<std::vector<at::Tensor>(at::Device)> run;
  // The tolerance between the CPU's and CUDA's results (tests/support/tolerance.h); 0: equal bits.
  double relative;
};

// Odd sizes, three dtypes, all layouts, and NaNs and infinities where no sum would hide the rest.
std::vector<CudaCase> cuda_cases();

}  // namespace semitone::test
