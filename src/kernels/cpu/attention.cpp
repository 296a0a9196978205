#include "src/kernels/attention_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/attention.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/exp-inl.h"
#include "src/kernels/cpu/vec-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Words = hn::RebindToUnsigned<Float>;
using Halves = hn::Rebind<std::uint16_t, Float>;
using Word = hn::Vec<Words>;

// `count` elements of 16 bits, widened to 32; the other lanes are 0.
HWY_INLINE Word load_wide(const std::uint16_t* from, std::size_t count) {
  return hn::PromoteTo(Words(), load_first(Halves(), from, count));
}

void pack_rows(const Bf16Matrix& matrix, std::size_t padded_rows, Bf16Pair* to) {
  for (std::size_t row = 0; row < padded_rows; row += 2, to += matrix.columns) {
    const std::uint16_t* even = matrix.data + row * matrix.stride;
    const std::uint16_t* odd = even + matrix.stride;
    for_vectors(matrix.columns, [&](std::size_t i, std::size_t n) {
      auto pairs = hn::Zero(Words());
      if (row < matrix.rows) pairs = load_wide(even + i, n);
      if (row + 1 < matrix.rows) pairs = hn::Or(pairs, hn::ShiftLeft<16>(load_wide(odd + i, n)));
      store_first(Words(), pairs, to + i, n);
    });
  }
}

// to[u][r]: the unit of memory u of row r. Rows from `rows` to padded_rows are 0.
template <class Unit>
HWY_INLINE void transpose_units(const Bf16Matrix& matrix, std::size_t padded_rows, Unit* to) {
  constexpr std::size_t kElementBytes = 2;
  constexpr std::size_t kElements = sizeof(Unit) / kElementBytes;
  // As many units of a row as fill a line of the cache.
  constexpr std::size_t kUnits = 64 / sizeof(Unit);
  const std::size_t units = matrix.columns / kElements;
  for (std::size_t begin = 0; begin < units; begin += kUnits) {
    const std::size_t end = std::min(units, begin + kUnits);
    for (std::size_t row = 0; row < matrix.rows; ++row) {
      const std::uint16_t* const from = matrix.data + row * matrix.stride;
      for (std::size_t unit = begin; unit < end; ++unit)
        std::memcpy(to + unit * padded_rows + row, from + unit * kElements, sizeof(Unit));
    }
  }
  for (std::size_t unit = 0; unit < units; ++unit) {
    std::fill(to + unit * padded_rows + matrix.rows, to + (unit + 1) * padded_rows, Unit{0});
  }
}

void pack_transposed(const Bf16Matrix& matrix, std::size_t padded_rows, Bf16Pair* to) {
  transpose_units(matrix, padded_rows, to);
}

void transpose(const Bf16Matrix& matrix, std::size_t padded_rows, std::uint16_t* to) {
  transpose_units(matrix, padded_rows, to);
}

// The first min(most, max(0, of_first + row)).
HWY_INLINE std::size_t count_of(std::ptrdiff_t of_first, std::size_t row, std::size_t most) {
  const std::ptrdiff_t count = of_first + static_cast<std::ptrdiff_t>(row);
  return count <= 0 ? 0 : std::min(most, static_cast<std::size_t>(count));
}

HWY_INLINE float largest_of(const float* from, std::size_t size) {
  const Float d;
  auto largest = hn::Set(d, -kInfinity);
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= size; i += hn::Lanes(d))
    largest = hn::Max(hn::LoadU(d, from + i), largest);
  // If all lanes are -inf, MaxOfLanes of Highway's target EMU128 returns the lowest finite number.
  const bool all_masked = hn::AllTrue(d, hn::Eq(largest, hn::Set(d, -kInfinity)));
  float result = all_masked ? -kInfinity : hn::GetLane(hn::MaxOfLanes(d, largest));
  for (; i < size; ++i) result = std::max(result, from[i]);
  return result;
}

constexpr std::size_t kBits = 32;  // in a word
constexpr std::uint32_t kSign = 1U << 31;

// One bit for each lane: that of key `lane` in a word.
HWY_INLINE Word bits_of_lanes() {
  const Words d32;
  const auto place = hn::And(hn::Iota(d32, 0), hn::Set(d32, kBits - 1));
  return hn::Shl(hn::Set(d32, 1), place);
}

// Marks the lanes of dropped keys from `key` on, a multiple of the number of lanes.
HWY_INLINE hn::Mask<Float> dropped_keys(const DroppedScores& dropped, std::size_t query,
                                        std::size_t key, Word bits) {
  const Words d32;
  const std::uint32_t* const word = dropped.bits + key / kBits * dropped.stride + query;
  auto words = hn::Set(d32, *word >> (key % kBits));
  if constexpr (hn::MaxLanes(Words()) > kBits) {
    if (hn::Lanes(d32) > kBits)
      words = hn::IfThenElse(hn::FirstN(d32, kBits), words, hn::Set(d32, word[dropped.stride]));
  }
  return hn::RebindMask(Float(), hn::Ne(hn::And(words, bits), hn::Zero(d32)));
}

// Sets the sign of the lanes of queries, from `query` on, that dropped the key.
HWY_INLINE Vector dropped_signs(const DroppedScores& dropped, std::size_t key, std::size_t query,
                                std::size_t count) {
  const Words d32;
  const std::uint32_t* const words = dropped.bits + key / kBits * dropped.stride + query;
  const int to_sign = static_cast<int>(kBits - 1 - key % kBits);
  const auto shifted = hn::ShiftLeftSame(load_first(d32, words, count), to_sign);
  return hn::BitCast(Float(), hn::And(shifted, hn::Set(d32, kSign)));
}

// scores = scale * scores + numbers
HWY_INLINE void add_mask(float* scores, std::size_t size, float scale, const float* numbers) {
  const Float d;
  for_vectors(size, [&](std::size_t i, std::size_t n) {
    const auto s = load_some(Fp32{}, scores + i, n);
    const auto v = hn::MulAdd(s, hn::Set(d, scale), load_some(Fp32{}, numbers + i, n));
    store_some(Fp32{}, v, scores + i, n);
  });
}

void softmax_block(const ScoreBlock& block, const SoftmaxRows& rows, std::uint16_t* probabilities) {
  const Float d;
  const bool is_masked = block.mask.numbers != nullptr;
  const float scale = is_masked ? 1 : block.scale;
  const bool is_dropping = block.dropped.bits != nullptr;
  const auto kept = hn::Set(d, block.dropped.scale);
  const auto bits = bits_of_lanes();
  for (std::size_t row = 0; row < block.queries; ++row) {
    float* const scores = block.scores + row * block.keys;
    std::uint16_t* const to = probabilities + row * block.keys;
    const std::size_t seen = count_of(block.seen, row, block.most_seen);
    if (is_masked)
      add_mask(scores, seen, block.scale, block.mask.numbers + row * block.mask.stride);
    const float max = std::max(rows.max[row], scale * largest_of(scores, seen));
    // Finite while all scores are -inf.
    const float centre = max == -kInfinity ? 0 : max;
    const float correction = std::exp(rows.max[row] - centre);
    auto sum = hn::Zero(d);
    const auto less = hn::Set(d, centre);
    for_vectors(seen, [&](std::size_t i, std::size_t n) {
      // Rounded after the multiplication, as the maximum is: so x is at most 0.
      const auto x = hn::Sub(hn::Mul(load_some(Fp32{}, scores + i, n), hn::Set(d, scale)), less);
      auto e = exp_of_negative(d, x);
      if (n < hn::Lanes(d)) e = hn::IfThenElseZero(hn::FirstN(d, n), e);
      sum = hn::Add(sum, e);
      if (is_dropping)
        e = hn::IfThenZeroElse(dropped_keys(block.dropped, row, i, bits), hn::Mul(e, kept));
      store_some(Bf16{}, e, to + i, n);
    });
    std::fill(to + seen, to + block.keys, std::uint16_t{0});
    rows.sum[row] = rows.sum[row] * correction + hn::GetLane(hn::SumOfLanes(d, sum));
    rows.max[row] = max;
    if (rows.output == nullptr || correction == 1) continue;
    float* const output = rows.output + row * rows.columns;
    for_vectors(rows.columns, [&](std::size_t i, std::size_t n) {
      const auto v = load_some(Fp32{}, output + i, n);
      store_some(Fp32{}, hn::Mul(v, hn::Set(d, correction)), output + i, n);
    });
  }
}

void divide_rows(const float* from, std::size_t rows, std::size_t columns, const float* sum,
                 std::uint16_t* to, std::size_t stride) {
  const Float d;
  for (std::size_t row = 0; row < rows; ++row) {
    const auto inverse = hn::Set(d, sum[row] == 0 ? 0 : 1 / sum[row]);
    for_vectors(columns, [&](std::size_t i, std::size_t n) {
      const auto v = load_some(Fp32{}, from + row * columns + i, n);
      store_some(Bf16{}, hn::Mul(v, inverse), to + row * stride + i, n);
    });
  }
}

void dot_rows(const Bf16Matrix& a, const Bf16Matrix& b, float* to) {
  const Float d;
  for (std::size_t row = 0; row < a.rows; ++row) {
    auto sum = hn::Zero(d);
    for_vectors(a.columns, [&](std::size_t i, std::size_t n) {
      sum = hn::MulAdd(load_some(Bf16{}, a.data + row * a.stride + i, n),
                       load_some(Bf16{}, b.data + row * b.stride + i, n), sum);
    });
    to[row] = hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

void transposed_softmax(const TransposedScores& block, std::uint16_t* probabilities) {
  const Float d;
  const auto scale = hn::Set(d, block.scale);
  const bool is_masked = block.mask.numbers != nullptr;
  const bool is_dropping = block.dropped.bits != nullptr;
  for (std::size_t key = 0; key < block.padded_keys; ++key) {
    const float* const numbers = is_masked ? block.mask.numbers + key * block.mask.stride : nullptr;
    const auto mask_at = [&](std::size_t i, std::size_t n) HWY_ATTR {
      return block.mask.is_same_for_queries ? hn::Set(d, *numbers)
                                            : load_some(Fp32{}, numbers + i, n);
    };
    float* const scores = block.scores + key * block.queries;
    std::uint16_t* const to = probabilities + key * block.queries;
    const std::size_t skipped =
        key < block.keys ? count_of(block.skipped, key, block.queries) : block.queries;
    for_vectors(block.queries, [&](std::size_t i, std::size_t n) {
      auto e = hn::Zero(d);
      if (i + n > skipped) {
        const auto log_sum = load_some(Fp32{}, block.log_sum + i, n);
        const auto s = load_some(Fp32{}, scores + i, n);
        const auto max = load_some(Fp32{}, block.max + i, n);
        const auto less = is_masked ? hn::Sub(hn::MulAdd(s, scale, mask_at(i, n)), max)
                                    : hn::Sub(hn::Mul(s, scale), max);
        // The product may be rounded otherwise than in the forward pass, and the largest score be
        // above the maximum: by 64 with a mask of -1e9.
        const auto negative = hn::IfThenZeroElse(hn::Gt(less, hn::Zero(d)), less);
        e = exp_of_negative(d, hn::Sub(negative, log_sum));
        // Also for NaN, as of a query of zeros and an infinite key.
        e = hn::IfThenZeroElse(hn::Eq(log_sum, hn::Set(d, kInfinity)), e);
        if (i < skipped) e = hn::IfThenZeroElse(hn::FirstN(d, skipped - i), e);
      }
      auto kept = e;
      if (is_dropping) {
        const auto sign = dropped_signs(block.dropped, key, i, n);
        // hn::IfNegativeThenElse is wrong for -0 on HWY_SCALAR, and for fp32 on HWY_SSSE3 (1.0.3).
        const auto is_kept =
            hn::RebindMask(d, hn::Eq(hn::BitCast(Words(), sign), hn::Zero(Words())));
        kept = hn::IfThenElseZero(is_kept, hn::Mul(e, hn::Set(d, block.dropped.scale)));
        e = hn::Or(e, sign);
      }
      store_some(Fp32{}, e, scores + i, n);
      store_some(Bf16{}, kept, to + i, n);
    });
  }
}

void score_gradients(const ScoreGradients& work, std::uint16_t* rows, Bf16Pair* pairs) {
  const Float d;
  const auto scale = hn::Set(d, work.scale);
  const auto kept_scale = hn::Set(d, work.kept_scale);
  const std::size_t queries = work.queries;
  for (std::size_t key = 0; key < work.padded_keys; key += 2) {
    for_vectors(queries, [&](std::size_t i, std::size_t n) {
      const auto delta = load_some(Fp32{}, work.delta + i, n);
      const auto gradient = [&](std::size_t row) {
        const std::size_t at = row * queries + i;
        const auto p = load_some(Fp32{}, work.probabilities + at, n);
        const auto grad = hn::Mul(load_some(Fp32{}, work.grad + at, n), kept_scale);
        const auto away = hn::Sub(hn::IfThenElseZero(hn::Ge(p, hn::Zero(d)), grad), delta);
        return bf16_in_upper_half(d, hn::Mul(hn::Mul(hn::Abs(p), away), scale));
      };
      const Word even = hn::ShiftRight<16>(gradient(key));
      const Word odd = gradient(key + 1);
      store_first(Halves(), hn::TruncateTo(Halves(), even), rows + key * queries + i, n);
      store_first(Halves(), hn::TruncateTo(Halves(), hn::ShiftRight<16>(odd)),
                  rows + (key + 1) * queries + i, n);
      const Word upper = hn::And(odd, hn::Set(Words(), 0xFFFF0000U));
      store_first(Words(), hn::Or(even, upper), pairs + key / 2 * queries + i, n);
    });
  }
}

void round_rows(const float* from, std::size_t rows, std::size_t columns, std::uint16_t* to,
                std::size_t stride) {
  for (std::size_t row = 0; row < rows; ++row) {
    for_vectors(columns, [&](std::size_t i, std::size_t n) {
      store_some(Bf16{}, load_some(Fp32{}, from + row * columns + i, n), to + row * stride + i, n);
    });
  }
}

void round_transposed(const float* from, std::size_t from_stride, std::size_t rows,
                      std::size_t columns, std::uint16_t* to, std::size_t stride) {
  const Float d;
  HWY_ALIGN float gathered[hn::MaxLanes(d)] = {};
  for (std::size_t row = 0; row < rows; ++row) {
    for_vectors(columns, [&](std::size_t i, std::size_t n) {
      for (std::size_t lane = 0; lane < n; ++lane)
        gathered[lane] = from[(i + lane) * from_stride + row];
      store_some(Bf16{}, hn::Load(d, gathered), to + row * stride + i, n);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(pack_rows);
HWY_EXPORT(pack_transposed);
HWY_EXPORT(transpose);
HWY_EXPORT(softmax_block);
HWY_EXPORT(divide_rows);
HWY_EXPORT(dot_rows);
HWY_EXPORT(transposed_softmax);
HWY_EXPORT(score_gradients);
HWY_EXPORT(round_rows);
HWY_EXPORT(round_transposed);

void pack_rows(const Bf16Matrix& matrix, std::size_t padded_rows, Bf16Pair* to) {
  HWY_DYNAMIC_DISPATCH(pack_rows)(matrix, padded_rows, to);
}

void pack_transposed(const Bf16Matrix& matrix, std::size_t padded_rows, Bf16Pair* to) {
  HWY_DYNAMIC_DISPATCH(pack_transposed)(matrix, padded_rows, to);
}

void transpose(const Bf16Matrix& matrix, std::size_t padded_rows, std::uint16_t* to) {
  HWY_DYNAMIC_DISPATCH(transpose)(matrix, padded_rows, to);
}

void softmax_block(const ScoreBlock& block, const SoftmaxRows& rows, std::uint16_t* probabilities) {
  HWY_DYNAMIC_DISPATCH(softmax_block)(block, rows, probabilities);
}

void divide_rows(const float* from, std::size_t rows, std::size_t columns, const float* sum,
                 std::uint16_t* to, std::size_t stride) {
  HWY_DYNAMIC_DISPATCH(divide_rows)(from, rows, columns, sum, to, stride);
}

void dot_rows(const Bf16Matrix& a, const Bf16Matrix& b, float* to) {
  HWY_DYNAMIC_DISPATCH(dot_rows)(a, b, to);
}

void transposed_softmax(const TransposedScores& block, std::uint16_t* probabilities) {
  HWY_DYNAMIC_DISPATCH(transposed_softmax)(block, probabilities);
}

void score_gradients(const ScoreGradients& work, std::uint16_t* rows, Bf16Pair* pairs) {
  HWY_DYNAMIC_DISPATCH(score_gradients)(work, rows, pairs);
}

void round_rows(const float* from, std::size_t rows, std::size_t columns, std::uint16_t* to,
                std::size_t stride) {
  HWY_DYNAMIC_DISPATCH(round_rows)(from, rows, columns, to, stride);
}

void round_transposed(const float* from, std::size_t from_stride, std::size_t rows,
                      std::size_t columns, std::uint16_t* to, std::size_t stride) {
  HWY_DYNAMIC_DISPATCH(round_transposed)(from, from_stride, rows, columns, to, stride);
}

}  // namespace semitone::kernels
#endif
