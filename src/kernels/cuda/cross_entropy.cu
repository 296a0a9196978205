#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/reduce.cuh"

#include <limits>

namespace semitone::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

__device__ bool is_class(const CrossEntropyRows& rows, std::size_t row) {
  return rows.target[row] >= 0 && static_cast<std::size_t>(rows.target[row]) < rows.classes;
}

// One block per row.
template <typename F>
__global__ void loss_of_row(const __grid_constant__ CrossEntropyRows rows,
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
  // The maximum drops NaNs, but the sums do not.
  float own_max = -kInfinity;
  for (std::size_t i = threadIdx.x; i < rows.classes; i += blockDim.x)
    own_max = LargerNumber{}(own_max, load<F>(rows.logits, first + i));
  const float max = over_block(is_nan(own_max) ? -kInfinity : own_max, LargerNumber{});
  const float centre = max == -kInfinity ? 0 : max;  // a finite number as long as all are -inf
  WideSum own_sum;
  WideSum own_away;
  for (std::size_t i = threadIdx.x; i < rows.classes; i += blockDim.x) {
    const float away = load<F>(rows.logits, first + i) - centre;
    own_sum.add(expf(away));
    own_away.add(away);
  }
  const double sum = block_sum(own_sum.total());
  const double away = block_sum(own_away.total());
  if (threadIdx.x != 0) return;
  const double smoothing = rows.label_smoothing;
  const double target =
      static_cast<double>(load<F>(rows.logits, first + static_cast<std::size_t>(rows.target[row])));
  double loss = log(sum) - (1 - smoothing) * (target - static_cast<double>(max));
  if (smoothing != 0) loss -= smoothing * away / static_cast<double>(rows.classes);
  results.loss[row] = static_cast<float>(loss);
  results.max[row] = max;
  results.inv_sum[row] = static_cast<float>(1 / sum);
}

// One block per row. Every element is read and written by one thread only, since the output may be
// the logits.
template <typename F>
__global__ void gradient_of_row(const __grid_constant__ CrossEntropyRows rows,
                                const __grid_constant__ CrossEntropyGradient work) {
  const std::size_t row = blockIdx.x;
  const std::size_t from = row * rows.stride;
  const std::size_t to = row * work.stride;
  if (rows.target[row] == rows.ignore_index) {
    for (std::size_t i = threadIdx.x; i < rows.classes; i += blockDim.x)
      store<F>(0, work.output, to + i);
    return;
  }
  if (!is_class(rows, row)) {
    for (std::size_t i = threadIdx.x; i < rows.classes; i += blockDim.x)
      store<F>(kNan, work.output, to + i);
    return;
  }
  const double smoothing = rows.label_smoothing;
  const double grad = static_cast<double>(work.grad[row * work.grad_step]);
  const double inv_sum = static_cast<double>(work.inv_sum[row]);
  const float max = work.max[row];
  // Not grad * 0, which is NaN for an infinite gradient.
  const double shared = smoothing == 0 ? 0 : grad * smoothing / static_cast<double>(rows.classes);
  const float factor = static_cast<float>(grad * inv_sum);
  const float less = static_cast<float>(shared);
  const std::size_t target = static_cast<std::size_t>(rows.target[row]);
  for (std::size_t i = threadIdx.x; i < rows.classes; i += blockDim.x) {
    const float v = load<F>(rows.logits, from + i);
    if (i == target) {
      const double probability = exp(static_cast<double>(v) - static_cast<double>(max)) * inv_sum;
      const double of_target = grad * (probability - (1 - smoothing)) - shared;
      store<F>(static_cast<float>(of_target), work.output, to + i);
    } else {
      store<F>(expf(v - max) * factor - less, work.output, to + i);
    }
  }
}

}  // namespace

void cross_entropy_cuda(const CrossEntropyRows& rows, const CrossEntropyResults& results,
                        std::size_t count, CudaStream stream) {
  with_format(rows.format, [&](auto format) {
    launch(stream, narrow_grid(count), threads_for(rows.classes), loss_of_row<decltype(format)>,
           rows, results);
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
