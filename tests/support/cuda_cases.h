#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

// What every kernel computes, with tensors on any device: to compare devices with each other.
namespace semitone::test {

struct CudaCase {
  std::string name;
  // The results, on the CPU. The inputs are always the same.
  std::function<std::vector<at::Tensor>(at::Device)> run;
  // How far the CPU's and CUDA's results may be apart (tests/support/tolerance.h); 0: not one bit.
  double relative;
};

// Odd sizes, three dtypes, all layouts, NaNs and infinities where no sum would hide the rest.
std::vector<CudaCase> cuda_cases();

}  // namespace semitone::test
