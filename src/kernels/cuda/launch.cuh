#pragma once

#include "semitone/core/error.h"
#include "src/kernels/cuda/cuda_kernels.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <limits>

// Launches kernels.
namespace semitone::kernels {

constexpr unsigned kWarp = 32;
// Threads of a block: enough to hide memory's latency, few enough that eight blocks share a
// multiprocessor.
constexpr unsigned kThreads = 256;
// The same as a tile: 32 columns, so that a warp reads neighbours, of 8 rows.
constexpr unsigned kTileRows = kThreads / kWarp;
// Sums have at most this many terms in fp32 before they continue in fp64.
constexpr int kTerms = 256;

// Whole warps, with a few elements for each thread of a short row.
inline unsigned threads_for(std::size_t columns) {
  unsigned threads = kWarp;
  while (threads < kThreads && std::size_t{threads} * 4 < columns) threads *= 2;
  return threads;
}

constexpr std::size_t ceil_divide(std::size_t a, std::size_t b) {
  return (a + b - 1) / b;
}

constexpr unsigned narrow_grid(std::size_t blocks) {
  if (blocks > std::numeric_limits<int>::max())
    throw Error("kernels.cuda", "work for fewer than 2^31 blocks of threads", "a larger tensor");
  return static_cast<unsigned>(blocks);
}

// Of a grid's second dimension.
constexpr std::size_t kMostGridRows = 65535;

constexpr unsigned grid_row(std::size_t blocks) {
  if (blocks > kMostGridRows)
    throw Error("kernels.cuda", "work for at most 65535 rows of blocks", "a wider tensor");
  return static_cast<unsigned>(blocks);
}

// Of all arguments of a kernel. Drivers before CUDA 12.1 take no more. Later ones do, but LibTorch
// does without where a launch is captured in a graph.
constexpr std::size_t kMostArgumentBytes = 4096;

template <typename... Parameters, typename... Arguments>
void launch(CudaStream stream, dim3 grid, dim3 block, void (*kernel)(Parameters...),
            const Arguments&... arguments) {
  constexpr std::size_t kAlignment = 8;
  static_assert((ceil_divide(sizeof(Parameters), kAlignment) + ... + 0) * kAlignment <=
                kMostArgumentBytes);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess)
    throw Error("kernels.cuda", "a kernel to start", cudaGetErrorString(error));
}

}  // namespace semitone::kernels
