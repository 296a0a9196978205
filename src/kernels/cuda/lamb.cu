#include "src/kernels/cuda/parts.cuh"
#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct LambMath : BasicLambRule<float> {
  // Updates the moments at element i of a span.
  __device__ void move(const UpdateSpan& span, std::size_t i, float grad, float param) const {
    if (weight_decay != 0) grad = scaled_sum(weight_decay, param, grad);
    const float m = scaled_sum(beta1, load_state(span, 0, i), beta3 * grad);
    const float v = scaled_sum(beta2, load_state(span, 1, i), one_minus_beta2 * grad * grad);
    store_state(flush_subnormal(m), span, 0, i);
    store_state(flush_subnormal(v), span, 1, i);
  }

  // The update that follows from the moments.
  __device__ float update(const UpdateSpan& span, std::size_t i, float param) const {
    const float m = load_state(span, 0, i) * inv_bias_correction1;
    const float v = load_state(span, 1, i) * inv_bias_correction2;
    const float u = m / (sqrtf(v) + eps);
    return decoupled_weight_decay != 0 ? scaled_sum(decoupled_weight_decay, param, u) : u;
  }

  // The second pass, in the form that update_table needs.
  __device__ float operator()(const UpdateSpan& span, std::size_t i, float /*grad*/,
                              float param) const {
    return scaled_sum(-step_size, update(span, i, param), param);
  }
};

__device__ double square(float value) {
  return static_cast<double>(value) * static_cast<double>(value);
}

// parts: two sums of each block.
__global__ void move_moments(const __grid_constant__ Table<UpdateItem<LambRule>> table,
                             const LambRule* rules_on_device, const float* found_inf,
                             double* parts) {
  const BlockRange range = range_of_block(table);
  const UpdateSpan& span = table.items[range.item].span;
  const LambMath math{rule_of(table, range.item, rules_on_device).as<float>()};
  const std::size_t end = is_set(found_inf) ? range.begin : range.end;
  double params = 0;
  double updates = 0;
  for (std::size_t i = range.begin + threadIdx.x; i < end; i += kThreads) {
    const float param = load_param(span, i);
    math.move(span, i, load(span.grad_format, span.grad, i) * math.grad_scale, param);
    params += square(param);
    updates += square(math.update(span, i, param));
  }
  params = block_sum(params);
  updates = block_sum(updates);
  if (threadIdx.x != 0) return;
  parts[2 * std::size_t{blockIdx.x}] = params;
  parts[2 * std::size_t{blockIdx.x} + 1] = updates;
}

}  // namespace

void lamb_moments_cuda(const CudaStep<LambRule>& step, double* parts, double* squares,
                       CudaStream stream) {
  for_update_tables(step, [&](const Table<UpdateItem<LambRule>>& table, const LambRule* rules,
                              std::size_t first_item, std::size_t first_block) {
    double* const of_table = parts + 2 * first_block;
    if (blocks_of(table) > 0) {
      launch(stream, blocks_of(table), kThreads, move_moments, table, rules, step.found_inf,
             of_table);
    }
    join_parts_of(table, 2, of_table, squares + 2 * first_item, Plus{}, stream);
  });
}

void update_cuda(const CudaStep<LambRule>& step, CudaStream stream) {
  run_update<LambMath>(step, stream);
}

}  // namespace semitone::kernels
