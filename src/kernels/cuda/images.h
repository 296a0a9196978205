#pragma once

#include <span>

// Which devices can run compiled kernels. Compute capabilities are numbers as in
// __CUDA_ARCH_LIST__: 9.0 is 900.
namespace semitone::kernels {

// Machine code runs on later devices of the same major version only. PTX, from which the driver
// compiles, runs on all later ones.
// @param has     of the device
// @param images  those that the kernels were compiled for
// @param ptx     the earliest of these with PTX; 0: none has it
constexpr bool runs_on(int has, std::span<const int> images, int ptx) {
  if (ptx > 0 && has >= ptx) return true;
  for (const int image : images)
    if (image / 100 == has / 100 && image <= has) return true;
  return false;
}

}  // namespace semitone::kernels
