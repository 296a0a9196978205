#pragma once

#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/split_master.cuh"
#include "src/kernels/cuda/tables.cuh"
#include "src/kernels/rounding.h"
#include "src/kernels/updates.h"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Processes UpdateSpans. Spans of the same kind share tables: for the usual kinds, the formats are
// known when the kernel is compiled, and a thread reads four elements of every tensor before it
// computes the first.
namespace semitone::kernels {

// The numbers of a rule in fp32.
template <typename Rule>
using NumbersOf = decltype(std::declval<Rule>().template as<float>());

template <typename Rule>
struct UpdateItem {
  UpdateSpan span;
  // Of no meaning if the rules are in the device's memory.
  NumbersOf<Rule> rule = Rule{}.template as<float>();
  unsigned number = 0;   // of the span in its step
  std::size_t head = 0;  // elements before the first chunk
  __host__ __device__ std::size_t size() const { return span.size; }
};

// a * b + c in two roundings.
__device__ inline float scaled_sum(float a, float b, float c) {
  return a * b + c;
}

__device__ inline float flush_subnormal(float value) {
  return number_of(flush_subnormal(bits_of(value)));
}

// Spans of one kind. Param is fp32, or Bf16 for split masters. There may be a copy in any format.
template <typename Grad, typename Param, typename State>
struct UsualSpans {
  static constexpr unsigned kElements = 4;
  static constexpr bool kSplit = sizeof(typename Param::Stored) == 2;

  static bool have(const UpdateSpan& span) {
    return span.grad_format == Grad::kFormat && span.param_format == Param::kFormat &&
           (span.low != nullptr) == kSplit && span.state_format == State::kFormat;
  }

  template <unsigned N>
  static __device__ void load_grad(const UpdateSpan& span, std::size_t i, float (&values)[N]) {
    load<Grad>(span.grad, i, values);
  }
  template <unsigned N>
  static __device__ void load_param(const UpdateSpan& span, std::size_t i, float (&values)[N]) {
    if constexpr (kSplit) {
      load_split(span, i, values);
    } else {
      load<Param>(span.param, i, values);
    }
  }
  template <unsigned N>
  static __device__ void store_param(const float (&values)[N], const UpdateSpan& span,
                                     std::size_t i) {
    if constexpr (kSplit) {
      store_split(values, span, i);
    } else {
      store<Param>(values, span.param, i);
    }
  }
  template <unsigned N>
  static __device__ void load_state(const UpdateSpan& span, int state, std::size_t i,
                                    float (&values)[N]) {
    load<State>(span.state[state], i, values);
  }
  template <unsigned N>
  static __device__ void store_state(const float (&values)[N], const UpdateSpan& span, int state,
                                     std::size_t i) {
    if (sizeof(typename State::Stored) == 2 && state < 2) {
      store_stochastic(values, span, state, i);
    } else {
      store<State>(values, span.state[state], i);
    }
  }
};

// All other spans, one element at a time.
struct OtherSpans {
  static constexpr unsigned kElements = 1;

  static __device__ void load_grad(const UpdateSpan& span, std::size_t i, float (&values)[1]) {
    values[0] = load(span.grad_format, span.grad, i);
  }
  static __device__ void load_param(const UpdateSpan& span, std::size_t i, float (&values)[1]) {
    if (span.low == nullptr) {
      values[0] = load(span.param_format, span.param, i);
    } else {
      load_split(span, i, values);
    }
  }
  static __device__ void store_param(const float (&values)[1], const UpdateSpan& span,
                                     std::size_t i) {
    if (span.low == nullptr) {
      store(span.param_format, values, span.param, i);
    } else {
      store_split(values, span, i);
    }
  }
  static __device__ void load_state(const UpdateSpan& span, int state, std::size_t i,
                                    float (&values)[1]) {
    values[0] = load(span.state_format, span.state[state], i);
  }
  // Rounded to nearest from state 2 on.
  static __device__ void store_state(const float (&values)[1], const UpdateSpan& span, int state,
                                     std::size_t i) {
    if (span.state_format != Format::fp32 && state < 2) {
      store_stochastic(values, span, state, i);
    } else {
      store(span.state_format, values, span.state[state], i);
    }
  }
};

template <typename Math, typename Rule>
__device__ Math math_of(const UpdateItem<Rule>& item, const Rule* rules_on_device) {
  return Math{rules_on_device != nullptr ? rules_on_device[item.number].template as<float>()
                                         : item.rule};
}

__device__ inline bool is_set(const float* found_inf) {
  return found_inf != nullptr && *found_inf != 0;
}

// Calls math(parameter, gradient, its states) for the N elements from i on. math changes parameters
// and states. If it has a function `sum`, that gets the parameters before and after.
template <typename Spans, unsigned N, typename Math>
__device__ void update_elements(const UpdateSpan& span, std::size_t i, const Math& math) {
  constexpr int kStates = Math::kStateTensors;
  float grad[N] = {};
  float param[N];
  float state[Math::kStateTensors + 1U][N];
  if constexpr (Math::kReadsGrad) Spans::load_grad(span, i, grad);
  Spans::load_param(span, i, param);
#pragma unroll
  for (int s = 0; s < kStates; ++s) Spans::load_state(span, s, i, state[s]);
  float before[N];
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    before[k] = param[k];
    float own[Math::kStateTensors + 1U];
#pragma unroll
    for (int s = 0; s < kStates; ++s) own[s] = state[s][k];
    math(param[k], grad[k] * math.grad_scale, own);
#pragma unroll
    for (int s = 0; s < kStates; ++s) state[s][k] = own[s];
  }
  if constexpr (requires { math.sum(before, param); }) math.sum(before, param);
  if constexpr (Math::kWritesStates) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) Spans::store_state(state[s], span, s, i);
  }
  if constexpr (Math::kWritesParam) {
    Spans::store_param(param, span, i);
    if (span.copy != nullptr) store(span.copy_format, param, span.copy, i);
  }
}

// The elements of this block.
template <typename Spans, typename Math, typename Rule>
__device__ void update_block(const UpdateItem<Rule>& item, const BlockRange& range,
                             const Math& math) {
  for_chunks<Spans::kElements>(range.begin, range.end, item.head, {threadIdx.x, kThreads},
                               [&](std::size_t i, auto count) {
                                 update_elements<Spans, decltype(count)::value>(item.span, i, math);
                               });
}

// Blocks on a multiprocessor. Each thread waits for four elements of all tensors at once: the fewer
// tensors, the more threads are needed. Four blocks have 64 registers for a thread, five have 48.
template <typename Math>
constexpr unsigned kUpdateBlocks = Math::kStateTensors == 0 ? 5 : 4;

template <typename Spans, typename Math, typename Rule>
__global__ void __launch_bounds__(kThreads, kUpdateBlocks<Math>)
    update_table(const __grid_constant__ Table<UpdateItem<Rule>> table, const Rule* rules_on_device,
                 const float* found_inf) {
  if (is_set(found_inf)) return;
  const BlockRange range = range_of_block(table);
  const UpdateItem<Rule>& item = table.items[range.item];
  update_block<Spans>(item, range, math_of<Math>(item, rules_on_device));
}

inline std::size_t head_of(const UpdateSpan& span, unsigned chunk) {
  Head head;
  head.add(span.grad, bytes_of(span.grad_format), chunk)
      .add(span.param, bytes_of(span.param_format), chunk)
      .add(span.low, sizeof(std::uint16_t), chunk)
      .add(span.copy, bytes_of(span.copy_format), chunk);
  for (const void* const state : span.state) head.add(state, bytes_of(span.state_format), chunk);
  return head.elements();
}

// Kinds of spans that have kernels of their own.
template <typename... Kinds>
struct KindList {};

// An fp32 model, and masters for a bf16 or fp16 one, in fp32 or split.
using UsualKinds = KindList<UsualSpans<Fp32, Fp32, Fp32>, UsualSpans<Bf16, Fp32, Fp32>,
                            UsualSpans<Fp16, Fp32, Fp32>, UsualSpans<Bf16, Bf16, Fp32>>;
using UsualKindsWithBf16State =
    KindList<UsualSpans<Fp32, Fp32, Fp32>, UsualSpans<Bf16, Fp32, Fp32>,
             UsualSpans<Fp16, Fp32, Fp32>, UsualSpans<Bf16, Bf16, Fp32>,
             UsualSpans<Fp32, Fp32, Bf16>, UsualSpans<Bf16, Bf16, Bf16>>;

// Calls run(kind, table, its first block) for tables that together hold the spans for which
// `which` is true.
template <typename... Kinds, typename Rule, typename Which, typename Run>
void for_update_tables(KindList<Kinds...> /*kinds*/, const CudaStep<Rule>& step, const Which& which,
                       const Run& run) {
  std::vector<unsigned> left;
  for (unsigned number = 0; number < step.spans.size(); ++number)
    if (which(step.spans[number])) left.push_back(number);
  std::size_t blocks_before = 0;
  const auto run_those = [&](auto kind, const std::vector<unsigned>& numbers) {
    for_tables<UpdateItem<Rule>>(
        numbers.size(),
        [&](std::size_t i) {
          const UpdateSpan& span = step.spans[numbers[i]];
          const Rule rule = step.rules_on_device != nullptr ? Rule{} : step.rules[numbers[i]];
          return UpdateItem<Rule>{span, rule.template as<float>(), numbers[i],
                                  head_of(span, decltype(kind)::kElements)};
        },
        [&](const Table<UpdateItem<Rule>>& table, std::size_t /*first_item*/,
            std::size_t first_block) { run(kind, table, blocks_before + first_block); });
    for (const unsigned number : numbers) blocks_before += cuda_blocks(step.spans[number].size);
  };
  const auto run_kind = [&](auto kind) {
    std::vector<unsigned> of_kind;
    std::vector<unsigned> others;
    for (const unsigned number : left)
      (decltype(kind)::have(step.spans[number]) ? of_kind : others).push_back(number);
    run_those(kind, of_kind);
    left = others;
  };
  (run_kind(Kinds{}), ...);
  run_those(OtherSpans{}, left);
}

// Processes the spans for which `which` is true: those with the states that Math has.
template <typename Math, typename List, typename Rule, typename Which>
void run_update(List kinds, const CudaStep<Rule>& step, const Which& which, CudaStream stream) {
  for_update_tables(kinds, step, which, [&](auto kind, const auto& table, std::size_t) {
    if (blocks_of(table) == 0) return;
    launch(stream, blocks_of(table), kThreads, update_table<decltype(kind), Math, Rule>, table,
           step.rules_on_device, step.found_inf);
  });
}

inline bool any_span(const UpdateSpan& /*span*/) {
  return true;
}

}  // namespace semitone::kernels
