#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/fast_math.cuh"
#include "src/kernels/cuda/reduce.cuh"

#include <limits>

namespace semitone::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

__device__ bool is_class(const CrossEntropyRows& rows, std::size_t row) {
  return rows.target[row] >= 0 && static_cast<std::size_t>(rows.target[row]) < rows.classes;
}

// Whether a row has no chunks of aligned elements, or where the first one begins.
template <typename F>
__device__ std::size_t head_of_row(const void* first, std::size_t from, const void* second,
                                   std::size_t to) {
  using Stored = typename F::Stored;
  Head head;
  head.add(static_cast<const Stored*>(first) + from, sizeof(Stored), kChunk);
  if (second != nullptr) head.add(static_cast<const Stored*>(second) + to, sizeof(Stored), kChunk);
  return head.elements();
}

// exp(x) of the difference x <= 0 between a logit and a larger one: off by 2^-22 + |x| 2^-23 of its
// size, and 0 below -87.
__device__ float exp_of(float x) {
  return exp2_of(x * 0x1.715476p+0F);  // log2(e)
}

// The largest of the numbers seen so far, and the sum of exp(number - largest): one look at each
// number is enough. A larger number rescales the sum. NaNs do not become the largest, but the sum is
// NaN.
class Softmax {
 public:
  template <unsigned N>
  __device__ void add(const float (&values)[N]) {
    float largest = values[0];
#pragma unroll
    for (unsigned k = 1; k < N; ++k) largest = fmaxf(largest, values[k]);
    if (largest > max_) {
      sum_.scale(exp_of(max_ - largest));
      max_ = largest;
    }
    const float centre = finite_or_zero(max_);
    float sum = 0;
#pragma unroll
    for (unsigned k = 0; k < N; ++k) sum += exp_of(values[k] - centre);
    sum_.add(sum, N);
  }
  __device__ float max() const { return max_; }
  // With the largest number of all threads.
  __device__ double sum(float max) {
    return sum_.total() * static_cast<double>(exp_of(max_ - finite_or_zero(max)));
  }

 private:
  // 0 as long as all numbers are -inf.
  static __device__ float finite_or_zero(float max) { return max == -kInfinity ? 0 : max; }

  float max_ = -kInfinity;
  WideSum sum_;
};

// One block per row.
template <typename F, bool kSmooths>
__global__ void __launch_bounds__(kThreads)
    loss_of_row(const __grid_constant__ CrossEntropyRows rows,
                const __grid_constant__ CrossEntropyResults results) {
  const std::size_t row = blockIdx.x;
  if (rows.target[row] == rows.ignore_index) {
    if (threadIdx.x == 0) results.loss[row] = results.max[row] = results.inv_sum[row] = 0;
    return;
  }
  if (!is_class(rows, row)) {
    if (threadIdx.x == 0) results.loss[row] = results.max[row] = results.inv_sum[row] = kNan;
    return;
  }
  const std::size_t first = row * rows.stride;
  const float target = load<F>(rows.logits, first + static_cast<std::size_t>(rows.target[row]));
  // Distances are summed from a number of the row, since the sums of the logits themselves would
  // lose digits if all are large.
  const float origin = target - target == 0 ? target : 0;
  Softmax own;
  WideSum own_away;
  for_chunks<kChunk>(first, first + rows.classes, head_of_row<F>(rows.logits, first, nullptr, 0),
                     {threadIdx.x, blockDim.x}, [&](std::size_t i, auto count) {
                       constexpr unsigned kCount = decltype(count)::value;
                       float value[kCount];
                       load<F>(rows.logits, i, value);
                       own.add(value);
                       if (!kSmooths) return;
                       float away = 0;
#pragma unroll
                       for (unsigned k = 0; k < kCount; ++k) away += value[k] - origin;
                       own_away.add(away, kCount);
                     });
  const float max = over_block(own.max(), LargerNumber{});
  const double sum = block_sum(own.sum(max));
  double away = 0;
  if (kSmooths) away = block_sum(own_away.total());
  if (threadIdx.x != 0) return;
  const double smoothing = rows.label_smoothing;
  const double wide_max = static_cast<double>(max);
  double loss = log(sum) - (1 - smoothing) * (static_cast<double>(target) - wide_max);
  if (kSmooths) {
    const double mean = away / static_cast<double>(rows.classes);
    loss -= smoothing * (mean + (static_cast<double>(origin) - wide_max));
  }
  results.loss[row] = static_cast<float>(loss);
  results.max[row] = max;
  results.inv_sum[row] = static_cast<float>(1 / sum);
}

template <typename F>
__device__ void fill_row(float value, const CrossEntropyRows& rows, void* output, std::size_t to) {
  for_chunks<kChunk>(to, to + rows.classes, head_of_row<F>(output, to, nullptr, 0),
                     {threadIdx.x, blockDim.x}, [&](std::size_t i, auto count) {
                       float values[decltype(count)::value];
#pragma unroll
                       for (float& one : values) one = value;
                       store<F>(values, output, i);
                     });
}

// One block per row. Every element is read and written by one thread only, since the output may be
// the logits. The target's is computed as if it were another class, and written again.
template <typename F>
__global__ void __launch_bounds__(kThreads)
    gradient_of_row(const __grid_constant__ CrossEntropyRows rows,
                    const __grid_constant__ CrossEntropyGradient work) {
  const std::size_t row = blockIdx.x;
  const std::size_t from = row * rows.stride;
  const std::size_t to = row * work.stride;
  if (rows.target[row] == rows.ignore_index) return fill_row<F>(0, rows, work.output, to);
  if (!is_class(rows, row)) return fill_row<F>(kNan, rows, work.output, to);
  const double smoothing = rows.label_smoothing;
  const double grad = static_cast<double>(work.grad[row * work.grad_step]);
  const double inv_sum = static_cast<double>(work.inv_sum[row]);
  const float max = work.max[row];
  // Not grad * 0, which is NaN for an infinite gradient.
  const double shared = smoothing == 0 ? 0 : grad * smoothing / static_cast<double>(rows.classes);
  const float factor = static_cast<float>(grad * inv_sum);
  const float less = static_cast<float>(shared);
  const std::size_t target = static_cast<std::size_t>(rows.target[row]);
  const bool has_target = threadIdx.x == 0;
  const float logit = has_target ? load<F>(rows.logits, from + target) : 0;
  __syncthreads();  // before another thread writes there
  const std::size_t head = head_of_row<F>(rows.logits, from, work.output, to);
  for_chunks<kChunk>(0, rows.classes, head, {threadIdx.x, blockDim.x},
                     [&](std::size_t i, auto count) {
                       float values[decltype(count)::value];
                       load<F>(rows.logits, from + i, values);
#pragma unroll
                       for (float& value : values) value = fmaf(exp_of(value - max), factor, -less);
                       store<F>(values, work.output, to + i);
                     });
  __syncthreads();
  if (!has_target) return;
  const double probability = exp(static_cast<double>(logit) - static_cast<double>(max)) * inv_sum;
  store<F>(static_cast<float>(grad * (probability - (1 - smoothing)) - shared), work.output,
           to + target);
}

}  // namespace

void cross_entropy_cuda(const CrossEntropyRows& rows, const CrossEntropyResults& results,
                        std::size_t count, CudaStream stream) {
  with_format(rows.format, [&](auto format) {
    using F = decltype(format);
    launch(stream, narrow_grid(count), threads_for(rows.classes),
           rows.label_smoothing == 0 ? loss_of_row<F, false> : loss_of_row<F, true>, rows, results);
  });
}

void cross_entropy_gradient_cuda(const CrossEntropyRows& rows, const CrossEntropyGradient& work,
                                 std::size_t count, CudaStream stream) {
  with_format(rows.format, [&](auto format) {
    launch(stream, narrow_grid(count), threads_for(rows.classes), gradient_of_row<decltype(format)>,
           rows, work);
  });
}

}  // namespace semitone::kernels
