#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <tuple>
#include <type_traits>

// As much of the CUDA runtime as src/kernels/cuda uses, on the CPU: found in place of NVIDIA's
// header, it lets a C++ compiler compile the .cu sources, and a launch runs the kernel before it
// returns. Blocks run one after the other, the threads of a block as fibers that take turns at
// barriers and exchanges.
//
// What it finds: wrong indices and results (under AddressSanitizer, any access outside of memory),
// barriers that not all threads of a block reach, wide accesses that are not aligned, and, by
// running threads in the opposite order, what depends on their order. What it cannot find: races between barriers that either order hides,
// the arithmetic of NVIDIA's own functions such as expf, speed.

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local

using cudaError_t = int;
using cudaStream_t = struct CudaOnCpuStream*;
constexpr cudaError_t cudaSuccess = 0;
constexpr cudaError_t cudaErrorInvalidConfiguration = 9;

struct uint3 {
  unsigned x = 0;
  unsigned y = 0;
  unsigned z = 0;
};
struct dim3 {
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  unsigned x;
  unsigned y;
  unsigned z;
};

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  void* attrs = nullptr;
  unsigned numAttrs = 0;
};

extern thread_local uint3 threadIdx;
extern thread_local uint3 blockIdx;
extern thread_local dim3 blockDim;
extern thread_local dim3 gridDim;

namespace cuda_on_cpu {

// Threads of a warp and of a block get their turns from the first to the last, or the other way.
enum class Order { forwards, backwards };
void set_order(Order order);

// Kernels launched so far.
std::size_t launches();

// Functions to call before and after each kernel.
void set_around_kernels(void (*before)(), void (*after)());

cudaError_t run(dim3 grid, dim3 block, const std::function<void()>& kernel);

constexpr std::size_t kWarp = 32;
// A value of each thread of this warp, given by all of them.
struct Exchanged {
  std::uint64_t values[kWarp];
};
const Exchanged& exchange(std::uint64_t value);
// This thread's place in its warp.
std::size_t lane();

// Ends the process if the address is no multiple of the size.
void check_alignment(const void* address, std::size_t bytes);

}  // namespace cuda_on_cpu

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= 4096, "more arguments than a launch may have");
  const std::tuple<Parameters...> copies(arguments...);
  return cuda_on_cpu::run(config->gridDim, config->blockDim, [&] { std::apply(kernel, copies); });
}

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid configuration argument";
}

void __syncthreads();

inline void __syncwarp() {
  cuda_on_cpu::exchange(0);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int away) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  if (mask != 0xFFFFFFFFU) std::terminate();  // only whole warps exchange
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const std::size_t from = cuda_on_cpu::lane() ^ static_cast<std::size_t>(away);
  bits = cuda_on_cpu::exchange(bits).values[from];
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
