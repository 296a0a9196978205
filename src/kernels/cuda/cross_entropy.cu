#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/fast_math.cuh"
#include "src/kernels/cuda/reduce.cuh"

#include <limits>

namespace semitone::kernels {
namespace {

constexpr double kLog2 = 0x1.62e42fefa39efp-1;  // log(2)
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

constexpr float kLog2OfE = 0x1.715476p+0F;  // off by 2^-26 of its size

// exp(x) of the difference x <= 0 between a logit and a larger one: off by 2^-22 + |x| 2^-23 of its
// size, and 0 below -87.
__device__ float exp_of(float x) {
  return exp2_of(x * kLog2OfE);
}

// 2^exponent of a whole number: 0 below -126, 1 above 0.
__device__ float power_of_two(float exponent) {
  return number_of(static_cast<std::uint32_t>(fminf(fmaxf(exponent, -127), 0) + 127) << 23);
}

// Exponents behind smaller numbers are exact whole numbers.
constexpr float kFar = 0x1p23F;

// The exponent of the power of two behind exp(max).
__device__ float exponent_behind(float max) {
  return ceilf(max * kLog2OfE);
}

// The largest of the numbers seen so far, at least -kFar, and the sum of exp(number) 2^-exponent,
// where 2^exponent is the power of two behind the largest: one look at each number is enough. A
// larger number rescales the sum, exactly, up to kFar. exp(x) is 2^(x log2(e)) with one rounding of
// the exponent; log2(e) is rounded in the same way everywhere. NaNs do not become the largest, but
// the sum is NaN.
template <bool kSumsExponents>
class Softmax {
 public:
  // origin: exponents are summed as differences from this one.
  __device__ explicit Softmax(float origin) : origin_(origin), away_(exponent_ - origin) {}

  template <unsigned N>
  __device__ void add(const float (&values)[N]) {
    float largest = values[0];
#pragma unroll
    for (unsigned k = 1; k < N; ++k) largest = fmaxf(largest, values[k]);
    if (largest > max_) {
      max_ = largest;
      const float before = exponent_;
      exponent_ = exponent_behind(max_);
      sum_.scale(power_of_two(before - exponent_));
      away_ = exponent_ - origin_;
    }
    float powers[N];
    float exponents[N];
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      exponents[k] = fmaf(values[k], kLog2OfE, -exponent_);
      powers[k] = exp2_of(exponents[k]);
    }
    sum_.add(sum_of(powers));
    if (kSumsExponents) exponents_.add(fmaf(N, away_, sum_of(exponents)));
  }
  __device__ float max() const { return max_; }
  // With the largest number of all threads.
  __device__ double sum(float max) const {
    const float behind = exponent_behind(max);
    return sum_.total() * static_cast<double>(power_of_two(exponent_ - behind));
  }
  __device__ double exponents() const { return exponents_.total(); }

 private:
  float max_ = -kFar;
  float exponent_ = exponent_behind(-kFar);
  float origin_;
  float away_;
  PairSum sum_;
  PairSum exponents_;
};

// Of a row whose largest logit is too far from 0 for powers of two, or whose exponents have no
// finite sum: by differences from the largest logit, with a second look at each.
template <typename F>
__device__ void loss_of_far_row(const CrossEntropyRows& rows, const CrossEntropyResults& results,
                                std::size_t row) {
  const std::size_t first = row * rows.stride;
  float max = -kInfinity;
  for (std::size_t k = threadIdx.x; k < rows.classes; k += blockDim.x)
    max = fmaxf(max, load<F>(rows.logits, first + k));
  max = over_block(max, LargerNumber{});
  const auto away_from_max = [&](float logit) {
    return static_cast<double>(logit) - static_cast<double>(max);
  };
  double sum = 0;
  double logs = 0;
  for (std::size_t k = threadIdx.x; k < rows.classes; k += blockDim.x) {
    const double away = away_from_max(load<F>(rows.logits, first + k));
    sum += static_cast<double>(exp_of(static_cast<float>(away)));
    logs += away;
  }
  sum = block_sum(sum);
  logs = block_sum(logs);
  if (threadIdx.x != 0) return;
  const double smoothing = rows.label_smoothing;
  const std::size_t target = first + static_cast<std::size_t>(rows.target[row]);
  double expected = (1 - smoothing) * away_from_max(load<F>(rows.logits, target));
  if (smoothing != 0) expected += smoothing * logs / static_cast<double>(rows.classes);
  results.loss[row] = static_cast<float>(log(sum) - expected);
  results.max[row] = max;
  results.inv_sum[row] = static_cast<float>(1 / sum);
}

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
  // Exponents are summed from one of the row, since the sums of the exponents themselves would
  // lose digits if all are large.
  const float origin = fabsf(target) < kFar ? exponent_behind(target) : 0;
  Softmax<kSmooths> own(origin);
  for_chunks<kChunk>(first, first + rows.classes, head_of_row<F>(rows.logits, first, nullptr, 0),
                     {threadIdx.x, blockDim.x}, [&](std::size_t i, auto count) {
                       float value[decltype(count)::value];
                       load<F>(rows.logits, i, value);
                       own.add(value);
                     });
  const float max = over_block(own.max(), LargerNumber{});
  const double sum = block_sum(own.sum(max));
  const double exponents = kSmooths ? block_sum(own.exponents()) : 0;
  if (!(fabsf(max) < kFar) || (kSmooths && exponents - exponents != 0))
    return loss_of_far_row<F>(rows, results, row);
  if (threadIdx.x != 0) return;
  // Logarithms are differences from that of the power of two behind the largest logit. The powers
  // near it are computed as in the sum, with the same error: a sum is not below one of its terms.
  const float behind = exponent_behind(max);
  const auto power_of = [&](float logit) {
    return static_cast<double>(exp2_of(fmaf(logit, kLog2OfE, -behind)));
  };
  const auto log_of = [&](double exponent) {
    return kLog2 * (exponent - static_cast<double>(behind));
  };
  const double power = power_of(target);
  const double log_of_target =
      power > 0.5 ? log(power)
                  : log_of(static_cast<double>(target) * static_cast<double>(kLog2OfE));
  const double smoothing = rows.label_smoothing;
  double expected = (1 - smoothing) * log_of_target;
  if (kSmooths) {
    const double mean = exponents / static_cast<double>(rows.classes);
    expected += smoothing * log_of(mean + static_cast<double>(origin));
  }
  results.loss[row] = static_cast<float>(log(sum) - expected);
  results.max[row] = max;
  results.inv_sum[row] = static_cast<float>(power_of(max) / sum);
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
  float less = static_cast<float>(shared);
#ifdef __CUDA_ARCH__
  asm volatile("" : "+f"(less));  // nvcc would convert it again for each chunk
#endif
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
