#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/reduce.cuh"

#include <algorithm>
#include <numeric>

namespace semitone::kernels {
namespace {

// A batch for blocks of (kWarp, kTileRows) threads, each of whose threads processes a single
// channel. With channels_last, a block has kWarp neighbouring channels, and a unit is a row.
// Without, a block has one channel, and a unit is a segment of a plane, one warp's work.
struct Units {
  bool channels_last;
  std::size_t channels;
  std::size_t length;    // of a plane
  std::size_t segments;  // of a plane
  std::size_t segment;   // elements
  std::size_t count;     // units of a channel
  std::size_t of_part;   // units that one block does
};

// 32 elements for each thread of a warp.
constexpr std::size_t kSegment = 32 * kWarp;

Units units_of(const BatchLayout& layout, std::size_t pieces) {
  if (layout.channels_last) return {true, layout.channels, 0, 0, 0, pieces, pieces};
  const std::size_t segments = ceil_divide(layout.length, kSegment);
  const std::size_t count = pieces / layout.channels * segments;
  return {
      false, layout.channels, layout.length, segments, ceil_divide(layout.length, segments), count,
      count};
}

// Parts of at least `fewest` units, and not more parts than `most`.
std::size_t cut(Units& units, std::size_t fewest, std::size_t most) {
  const std::size_t parts = std::clamp<std::size_t>(units.count / fewest, 1, most);
  units.of_part = ceil_divide(units.count, parts);
  return ceil_divide(units.count, units.of_part);
}

// About 100 blocks per channel for large batches: parts cost another launch and 24 bytes each.
std::size_t cut_for_sums(Units& units) {
  return cut(units, 32 * kTileRows, 128);
}

dim3 grid_of(const Units& units, std::size_t parts) {
  const std::size_t columns =
      units.channels_last ? ceil_divide(units.channels, kWarp) : units.channels;
  return dim3(narrow_grid(columns), static_cast<unsigned>(parts));
}

constexpr dim3 kTile(kWarp, kTileRows);

// This thread's channel; none from `channels` on.
__device__ std::size_t channel_of(const Units& units) {
  if (!units.channels_last) return blockIdx.x;
  return std::size_t{blockIdx.x} * kWarp + threadIdx.x;
}

// Calls visit(first, step, count) for this thread's elements first, first + step, ….
template <typename Visit>
__device__ void for_runs(const Units& units, const Visit& visit) {
  const std::size_t channel = channel_of(units);
  const std::size_t begin = std::size_t{blockIdx.y} * units.of_part + threadIdx.y;
  const std::size_t stop = (std::size_t{blockIdx.y} + 1) * units.of_part;
  const std::size_t end = stop < units.count ? stop : units.count;
  if (channel >= units.channels || begin >= end) return;
  if (units.channels_last) {
    visit(begin * units.channels + channel, kTileRows * units.channels,
          (end - begin + kTileRows - 1) / kTileRows);
    return;
  }
  for (std::size_t unit = begin; unit < end; unit += kTileRows) {
    const std::size_t image = unit / units.segments;
    const std::size_t from = unit % units.segments * units.segment + threadIdx.x;
    const std::size_t to_stop = (unit % units.segments + 1) * units.segment;
    const std::size_t to = to_stop < units.length ? to_stop : units.length;
    if (from < to) {
      visit((image * units.channels + channel) * units.length + from, std::size_t{kWarp},
            (to - from + kWarp - 1) / kWarp);
    }
  }
}

// Calls visit(i) for each of this thread's elements.
template <typename Visit>
__device__ void for_elements(const Units& units, const Visit& visit) {
  for_runs(units, [&](std::size_t first, std::size_t step, std::size_t count) {
    for (std::size_t k = 0, i = first; k < count; ++k, i += step) visit(i);
  });
}

// Over all threads of this thread's channel.
__device__ double channel_sum(const Units& units, double value) {
  return units.channels_last ? column_sum(value) : block_sum(value);
}

// Whether this thread writes its channel's results.
__device__ bool writes(const Units& units) {
  if (units.channels_last) return threadIdx.y == 0 && channel_of(units) < units.channels;
  return threadIdx.y == 0 && threadIdx.x == 0;
}

// Some of a channel's elements.
struct Part {
  double count = 0;
  double mean = 0;
  double m2 = 0;
};

// The formula of Chan, Golub and LeVeque.
__device__ void merge(Part& all, const Part& part) {
  const double both = all.count + part.count;
  const double delta = part.mean - all.mean;
  all.m2 += part.m2 + delta * delta * all.count * part.count / both;
  all.mean += delta * part.count / both;
  all.count = both;
}

// No more than fit in registers, where they are read twice.
constexpr int kHeld = 16;

// Around a mean that is rounded to fp32; its error, offset / count, is subtracted.
template <typename F>
__device__ Part part_of(const void* input, std::size_t first, std::size_t step, int count) {
  float held[kHeld];
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    held[k] = k < count ? load<F>(input, first + static_cast<std::size_t>(k) * step) : 0;
    sum += held[k];
  }
  const float centre = sum / static_cast<float>(count);
  float offset = 0;
  float squares = 0;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const float away = k < count ? held[k] - centre : 0;
    offset += away;
    squares += away * away;
  }
  const double size = count;
  const double off = static_cast<double>(offset);
  const double m2 = static_cast<double>(squares) - off * off / size;
  return {size, static_cast<double>(centre) + off / size, m2 < 0 ? 0 : m2};  // NaN stays
}

// parts: (parts, 3, channels) of count, mean, m2.
template <typename F>
__global__ void part_moments(const __grid_constant__ Units units, const void* input,
                             double* parts) {
  Part own;
  for_runs(units, [&](std::size_t first, std::size_t step, std::size_t count) {
    for (std::size_t done = 0; done < count; done += kHeld) {
      const std::size_t rest = count - done;
      merge(own, part_of<F>(input, first + done * step, step,
                            rest < kHeld ? static_cast<int>(rest) : kHeld));
    }
  });
  const double count = channel_sum(units, own.count);
  const double mean = channel_sum(units, own.count * own.mean) / count;
  const double off = own.count == 0 ? 0 : own.mean - mean;
  const double m2 = channel_sum(units, own.m2 + own.count * off * off);
  if (!writes(units)) return;
  double* const results = parts + blockIdx.y * 3 * units.channels + channel_of(units);
  results[0] = count;
  results[units.channels] = mean;
  results[2 * units.channels] = m2;
}

// One thread per channel.
__global__ void merge_moments(const double* parts, std::size_t count, std::size_t channels,
                              double* mean, double* m2) {
  const std::size_t channel = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (channel >= channels) return;
  Part all;
  for (std::size_t part = 0; part < count; ++part) {
    const double* const of = parts + part * 3 * channels + channel;
    merge(all, {of[0], of[channels], of[2 * channels]});
  }
  mean[channel] = all.mean;
  m2[channel] = all.m2;
}

// parts: (parts, 2, channels).
template <typename F>
__global__ void part_gradient_sums(const __grid_constant__ Units units,
                                   const __grid_constant__ BatchGradient work, double* parts) {
  const std::size_t channel = channel_of(units);
  const float mean = channel < units.channels ? work.mean[channel] : 0;
  WideSum sum;
  WideSum centred;
  for_elements(units, [&](std::size_t i) {
    const float g = load<F>(work.grad, i);
    sum.add(g);
    centred.add(g * (load<F>(work.input, i) - mean));
  });
  const double all = channel_sum(units, sum.total());
  const double all_centred = channel_sum(units, centred.total());
  if (!writes(units)) return;
  double* const results = parts + blockIdx.y * 2 * units.channels + channel;
  results[0] = all;
  results[units.channels] = all_centred;
}

// One thread per sum.
__global__ void add_gradient_sums(const double* parts, std::size_t count, std::size_t channels,
                                  double* sums, double* centred_sums) {
  const std::size_t channel = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (channel >= channels) return;
  double sum = 0;
  double centred = 0;
  for (std::size_t part = 0; part < count; ++part) {
    const double* const of = parts + part * 2 * channels + channel;
    sum += of[0];
    centred += of[channels];
  }
  sums[channel] = sum;
  centred_sums[channel] = centred;
}

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

struct Differentiating {
  static constexpr unsigned kNumbers = 4;
  BatchGradient work;

  __host__ __device__ const void* first() const { return work.input; }
  __host__ __device__ const void* second() const { return work.grad; }
  __host__ __device__ void* output() const { return work.output; }
  __device__ void load_numbers(std::size_t channel, float (&numbers)[kNumbers]) const {
    numbers[0] = work.mean[channel];
    numbers[1] = work.a[channel];
    numbers[2] = work.b[channel];
    numbers[3] = work.c[channel];
  }
  __device__ float operator()(float first, float second, const float* numbers) const {
    const float away = first - numbers[0];
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

unsigned blocks_for_channels(const BatchLayout& layout) {
  return narrow_grid(ceil_divide(layout.channels, kThreads));
}

}  // namespace

std::size_t batch_parts_cuda(const BatchLayout& layout, std::size_t pieces) {
  Units units = units_of(layout, pieces);
  return cut_for_sums(units);
}

void batch_moments_cuda(const BatchLayout& layout, const void* input, std::size_t pieces,
                        double* parts, double* mean, double* m2, CudaStream stream) {
  Units units = units_of(layout, pieces);
  const std::size_t count = cut_for_sums(units);
  with_format(layout.format, [&](auto format) {
    launch(stream, grid_of(units, count), kTile, part_moments<decltype(format)>, units, input,
           parts);
  });
  launch(stream, blocks_for_channels(layout), kThreads, merge_moments, parts, count,
         layout.channels, mean, m2);
}

void batch_normalize_cuda(const BatchLayout& layout, const BatchNormalize& work, std::size_t pieces,
                          CudaStream stream) {
  compute_batch(layout, Normalizing{work}, pieces, stream);
}

void batch_gradient_sums_cuda(const BatchLayout& layout, const BatchGradient& work,
                              std::size_t pieces, double* parts, double* sums, double* centred_sums,
                              CudaStream stream) {
  Units units = units_of(layout, pieces);
  const std::size_t count = cut_for_sums(units);
  with_format(layout.format, [&](auto format) {
    launch(stream, grid_of(units, count), kTile, part_gradient_sums<decltype(format)>, units, work,
           parts);
  });
  launch(stream, blocks_for_channels(layout), kThreads, add_gradient_sums, parts, count,
         layout.channels, sums, centred_sums);
}

void batch_gradient_of_input_cuda(const BatchLayout& layout, const BatchGradient& work,
                                  std::size_t pieces, CudaStream stream) {
  compute_batch(layout, Differentiating{work}, pieces, stream);
}

}  // namespace semitone::kernels
