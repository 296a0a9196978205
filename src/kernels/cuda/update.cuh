#pragma once

#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/tables.cuh"
#include "src/kernels/rounding.h"
#include "src/kernels/updates.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

// Processes the UpdateSpans of a table, one element per thread at a time.
namespace semitone::kernels {

template <typename Rule>
struct UpdateItem {
  UpdateSpan span;
  Rule rule;  // of no meaning if the rules are in the device's memory
  __host__ __device__ std::size_t size() const { return span.size; }
};

// a * b + c in two roundings.
__device__ inline float scaled_sum(float a, float b, float c) {
  return a * b + c;
}

__device__ inline float load_state(const UpdateSpan& span, int k, std::size_t i) {
  return load(span.state_format, span.state[k], i);
}

__device__ inline float flush_subnormal(float value) {
  return number_of(flush_subnormal(bits_of(value)));
}

// Rounded to nearest, if the state is not fp32.
__device__ inline void store_state(float value, const UpdateSpan& span, int k, std::size_t i) {
  store(span.state_format, value, span.state[k], i);
}

// State 0 and, with kSecond, state 1, as the next step will read them.
template <bool kSecond>
__device__ inline void store_moments(const UpdateSpan& span, std::size_t i, float first,
                                     float second = 0) {
  if (span.state_format == Format::fp32) {
    store_state(first, span, 0, i);
    if (kSecond) store_state(second, span, 1, i);
    return;
  }
  const std::uint32_t random =
      hash_bits((span.first_element + static_cast<std::uint32_t>(i)) ^ span.seed);
  static_cast<std::uint16_t*>(span.state[0])[i] =
      bf16_from_fp32_stochastic(bits_of(first), static_cast<std::uint16_t>(random));
  if (!kSecond) return;
  static_cast<std::uint16_t*>(span.state[1])[i] =
      bf16_from_fp32_stochastic(bits_of(second), static_cast<std::uint16_t>(random >> 16));
}

__device__ inline float load_param(const UpdateSpan& span, std::size_t i) {
  if (span.low == nullptr) return load(span.param_format, span.param, i);
  return number_of(join_fp32({static_cast<const std::uint16_t*>(span.param)[i], span.low[i]}));
}

__device__ inline void store_param(float value, const UpdateSpan& span, std::size_t i) {
  if (span.low == nullptr) {
    store(span.param_format, value, span.param, i);
  } else {
    const SplitFp32 split = split_fp32(bits_of(value));
    static_cast<std::uint16_t*>(span.param)[i] = split.high;
    span.low[i] = split.low;
  }
  if (span.copy != nullptr) store(span.copy_format, value, span.copy, i);
}

template <typename Rule>
__device__ const Rule& rule_of(const Table<UpdateItem<Rule>>& table, unsigned item,
                               const Rule* rules_on_device) {
  return rules_on_device != nullptr ? rules_on_device[item] : table.items[item].rule;
}

__device__ inline bool is_set(const float* found_inf) {
  return found_inf != nullptr && *found_inf != 0;
}

// new parameter = math(span, i, gradient, parameter) for every element. math has the rule's
// numbers as fp32, and itself loads and stores the state at element i.
template <typename Math, typename Rule>
__global__ void update_table(const __grid_constant__ Table<UpdateItem<Rule>> table,
                             const Rule* rules_on_device, const float* found_inf) {
  if (is_set(found_inf)) return;
  const BlockRange range = range_of_block(table);
  const UpdateSpan& span = table.items[range.item].span;
  const Math math{rule_of(table, range.item, rules_on_device).template as<float>()};
  for (std::size_t i = range.begin + threadIdx.x; i < range.end; i += kThreads) {
    const float grad = load(span.grad_format, span.grad, i) * math.grad_scale;
    store_param(math(span, i, grad, load_param(span, i)), span, i);
  }
}

// Calls run(table, its rules in the device's memory or null, its first item, its first block).
template <typename Rule, typename Run>
void for_update_tables(const CudaStep<Rule>& step, const Run& run) {
  const bool on_device = step.rules_on_device != nullptr;
  for_tables<UpdateItem<Rule>>(
      step.spans.size(),
      [&](std::size_t i) {
        return UpdateItem<Rule>{step.spans[i], on_device ? Rule{} : step.rules[i]};
      },
      [&](const Table<UpdateItem<Rule>>& table, std::size_t first_item, std::size_t first_block) {
        run(table, on_device ? step.rules_on_device + first_item : nullptr, first_item,
            first_block);
      });
}

template <typename Math, typename Rule>
void run_update(const CudaStep<Rule>& step, CudaStream stream) {
  for_update_tables(
      step, [&](const Table<UpdateItem<Rule>>& table, const Rule* rules, std::size_t, std::size_t) {
        if (blocks_of(table) == 0) return;
        launch(stream, blocks_of(table), kThreads, update_table<Math, Rule>, table, rules,
               step.found_inf);
      });
}

}  // namespace semitone::kernels
