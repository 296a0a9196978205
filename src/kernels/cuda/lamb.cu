#include "src/kernels/cuda/parts.cuh"
#include "src/kernels/cuda/squares.cuh"
#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct LambMath : BasicLambRule<float> {
  static constexpr unsigned kStateTensors = 2;

  // Updates the moments.
  __device__ void move(float param, float grad, float* state) const {
    if (weight_decay != 0) grad = scaled_sum(weight_decay, param, grad);
    state[0] = flush_subnormal(scaled_sum(beta1, state[0], beta3 * grad));
    state[1] = flush_subnormal(scaled_sum(beta2, state[1], one_minus_beta2 * grad * grad));
  }

  // The update that follows from the moments.
  __device__ float update(float param, const float* state) const {
    const float m = state[0] * inv_bias_correction1;
    const float v = state[1] * inv_bias_correction2;
    const float u = m / (sqrtf(v) + eps);
    return decoupled_weight_decay != 0 ? scaled_sum(decoupled_weight_decay, param, u) : u;
  }
};

// The first pass, with two sums.
struct LambMoments : LambMath {
  static constexpr bool kReadsGrad = true;
  static constexpr bool kWritesStates = true;
  static constexpr bool kWritesParam = false;

  SquareSum* params;
  SquareSum* updates;

  // Leaves the update in the place of the parameter.
  __device__ void operator()(float& param, float grad, float* state) const {
    move(param, grad, state);
    param = update(param, state);
  }
  template <unsigned N>
  __device__ void sum(const float (&param)[N], const float (&update)[N]) const {
    params->add<true>(param);
    updates->add<true>(update);
  }
};

// The second pass.
struct LambStep : LambMath {
  static constexpr bool kReadsGrad = false;
  static constexpr bool kWritesStates = false;
  static constexpr bool kWritesParam = true;

  __device__ void operator()(float& param, float /*grad*/, float* state) const {
    param = scaled_sum(-step_size, update(param, state), param);
  }
};

// parts: two sums of each block.
template <typename Spans>
__global__ void __launch_bounds__(kThreads, 4)
    move_moments(const __grid_constant__ Table<UpdateItem<LambRule>> table,
                 const LambRule* rules_on_device, const float* found_inf, double* parts) {
  SquareSum own_params;
  SquareSum own_updates;
  if (!is_set(found_inf)) {
    const BlockRange range = range_of_block(table);
    const UpdateItem<LambRule>& item = table.items[range.item];
    const LambMath math = math_of<LambMath>(item, rules_on_device);
    update_block<Spans>(item, range, LambMoments{math, &own_params, &own_updates});
  }
  const double params = block_sum(own_params.total());
  const double updates = block_sum(own_updates.total());
  if (threadIdx.x != 0) return;
  parts[2 * std::size_t{blockIdx.x}] = params;
  parts[2 * std::size_t{blockIdx.x} + 1] = updates;
}

}  // namespace

void lamb_moments_cuda(const CudaStep<LambRule>& step, double* parts, double* squares,
                       CudaStream stream) {
  for_update_tables(
      UsualKinds{}, step, any_span,
      [&](auto kind, const Table<UpdateItem<LambRule>>& table, std::size_t first_block) {
        double* const of_table = parts + 2 * first_block;
        if (blocks_of(table) > 0) {
          launch(stream, blocks_of(table), kThreads, move_moments<decltype(kind)>, table,
                 step.rules_on_device, step.found_inf, of_table);
        }
        join_parts_of(table, 2, of_table, squares, Plus{}, stream);
      });
}

void update_cuda(const CudaStep<LambRule>& step, CudaStream stream) {
  run_update<LambStep>(UsualKinds{}, step, any_span, stream);
}

}  // namespace semitone::kernels
