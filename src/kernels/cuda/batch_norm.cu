#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/launch.cuh"

#include <algorithm>
#include <numeric>

namespace semitone::kernels {
namespace {

// Elements that need no reduction: each has a first value and perhaps a second one, and numbers of
// its channel.
struct Normalizing {
  static constexpr unsigned kNumbers = 3;
  BatchNormalize work;

  __host__ __device__ const void* first() const { return work.input; }
  __host__ __device__ const void* second() const { return work.residual; }
  __host__ __device__ void* output() const { return work.output; }
  __device__ void load_numbers(std::size_t channel, float (&numbers)[kNumbers]) const {
    numbers[0] = work.mean[channel];
    numbers[1] = work.scale[channel];
    numbers[2] = work.shift[channel];
  }
  __device__ float operator()(float first, float second, const float* numbers) const {
    float v = (first - numbers[0]) * numbers[1] + numbers[2];
    if (work.residual != nullptr) v = v + second;
    if (work.relu) v = v < 0 ? 0 : v;  // NaN stays
    return v;
  }
};

template <bool kRelu>
struct Differentiating {
  static constexpr unsigned kNumbers = kRelu ? 5 : 4;
  BatchGradient work;
  float vanishing;

  __host__ __device__ const void* first() const { return work.input; }
  __host__ __device__ const void* second() const { return work.grad; }
  __host__ __device__ void* output() const { return work.output; }
  __device__ void load_numbers(std::size_t channel, float (&numbers)[kNumbers]) const {
    numbers[0] = work.mean[channel];
    numbers[1] = work.a[channel];
    numbers[2] = work.b[channel];
    numbers[3] = work.c[channel];
    if constexpr (kRelu) numbers[4] = work.shift[channel];
  }
  __device__ float operator()(float first, float second, const float* numbers) const {
    const float away = first - numbers[0];
    if constexpr (kRelu) {
      if (away * numbers[1] + numbers[4] <= vanishing) second = 0;
    }
    const float g = second * numbers[1];
    return away * numbers[2] + numbers[3] + g;
  }
};

// The places of channels in memory: runs of `length` neighbouring elements of a channel.
struct Runs {
  std::size_t size;  // elements in all
  std::size_t length;
  std::size_t channels;
};

// Calls work for the N elements from i on. numbers(k) are those of element i + k.
template <typename F, unsigned N, typename Work, typename Numbers>
__device__ void compute_elements(const Work& work, std::size_t i, const Numbers& numbers) {
  float first[N];
  float second[N] = {};
  load<F>(work.first(), i, first);
  if (work.second() != nullptr) load<F>(work.second(), i, second);
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    float own[Work::kNumbers];
    numbers(k, own);
    first[k] = work(first[k], second[k], own);
  }
  store<F>(first, work.output(), i);
}

// Runs that are at least as long as a chunk: a chunk has elements of one channel, and perhaps of
// the next one. All elements are in no chunk (`head`) if runs are shorter.
template <typename F, typename Work>
__global__ void __launch_bounds__(kThreads)
    elements_of_runs(const __grid_constant__ Runs runs, const __grid_constant__ Work work,
                     std::size_t head) {
  const Share share{blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads};
  for_chunks<kChunk>(0, runs.size, head, share, [&](std::size_t i, auto count) {
    constexpr unsigned kCount = decltype(count)::value;
    const std::size_t run = i / runs.length;
    const std::size_t left = (run + 1) * runs.length - i;
    const std::size_t channel = run % runs.channels;
    float here[Work::kNumbers];
    float next[Work::kNumbers];
    work.load_numbers(channel, here);
    if (kCount > 1) work.load_numbers(channel + 1 == runs.channels ? 0 : channel + 1, next);
    compute_elements<F, kCount>(work, i, [&](unsigned k, float* own) {
#pragma unroll
      for (unsigned n = 0; n < Work::kNumbers; ++n)
        own[n] = kCount == 1 || k < left ? here[n] : next[n];
    });
  });
}

// Runs of one element, and a multiple of kChunk channels. The number of threads is a multiple of the
// chunks in a row, so that a thread's channels stay the same.
template <typename F, typename Work>
__global__ void __launch_bounds__(kThreads)
    elements_of_rows(const __grid_constant__ Runs runs, const __grid_constant__ Work work) {
  const std::size_t thread = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::size_t step = std::size_t{gridDim.x} * kThreads * kChunk;
  const std::size_t channel = thread * kChunk % runs.channels;
  float numbers[kChunk][Work::kNumbers];
#pragma unroll
  for (unsigned k = 0; k < kChunk; ++k) work.load_numbers(channel + k, numbers[k]);
  for (std::size_t i = thread * kChunk; i < runs.size; i += step) {
    compute_elements<F, kChunk>(work, i, [&](unsigned k, float* own) {
#pragma unroll
      for (unsigned n = 0; n < Work::kNumbers; ++n) own[n] = numbers[k][n];
    });
  }
}

template <typename Work>
void compute_batch(const BatchLayout& layout, const Work& work, std::size_t pieces,
                   CudaStream stream) {
  // Several chunks for each thread that first loads the numbers of its channels.
  constexpr std::size_t kMostForRows = 2048;
  constexpr std::size_t kMost = 1 << 16;
  const Runs runs{pieces * layout.length, layout.channels_last ? 1 : layout.length,
                  layout.channels};
  const std::size_t bytes = bytes_of(layout.format);
  const std::size_t head = Head{}
                               .add(work.first(), bytes, kChunk)
                               .add(work.second(), bytes, kChunk)
                               .add(work.output(), bytes, kChunk)
                               .elements();
  const std::size_t blocks = ceil_divide(runs.size, std::size_t{kChunk} * kThreads);
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    if (layout.channels_last && layout.channels % kChunk == 0 && head == 0) {
      const std::size_t in_row = layout.channels / kChunk;
      const std::size_t multiple = in_row / std::gcd(in_row, std::size_t{kThreads});
      const std::size_t grid = ceil_divide(std::min(blocks, kMostForRows), multiple) * multiple;
      launch(stream, narrow_grid(grid), kThreads, elements_of_rows<F, Work>, runs, work);
    } else {
      launch(stream, static_cast<unsigned>(std::min(blocks, kMost)), kThreads,
             elements_of_runs<F, Work>, runs, work, runs.length < kChunk ? Head::kNone : head);
    }
  });
}

}  // namespace

void batch_normalize_cuda(const BatchLayout& layout, const BatchNormalize& work, std::size_t pieces,
                          CudaStream stream) {
  compute_batch(layout, Normalizing{work}, pieces, stream);
}

void batch_gradient_of_input_cuda(const BatchLayout& layout, const BatchGradient& work,
                                  std::size_t pieces, CudaStream stream) {
  if (work.shift != nullptr) {
    compute_batch(layout, Differentiating<true>{work, vanishing(layout.format)}, pieces, stream);
  } else {
    compute_batch(layout, Differentiating<false>{work, 0}, pieces, stream);
  }
}

}  // namespace semitone::kernels
