#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>
#include <cstdint>

// The parts of attention between its matrix products, on blocks of one head: see attention.h. All
// elements of 16 bits are bf16, rounded to nearest, ties to even.
namespace semitone::kernels {

struct Bf16Matrix {
  const std::uint16_t* data;
  std::size_t rows;
  std::size_t columns;
  std::size_t stride;  // from a row to the next
};

// Two elements of a column, as processors' instructions read the right factor of a product. The
// element of the even row is in the lower half.
using Bf16Pair = std::uint32_t;

// A matrix as a right factor: to[r / 2][c] holds the elements of rows r and r + 1. Rows from
// matrix.rows to padded_rows, which is even, are 0.
void pack_rows(const Bf16Matrix& matrix, std::size_t padded_rows, Bf16Pair* to);

// The transposed matrix as a right factor: to[c / 2][r], where r goes to padded_rows. The number of
// columns is even.
void pack_transposed(const Bf16Matrix& matrix, std::size_t padded_rows, Bf16Pair* to);

// to[c][r], where r goes to padded_rows.
void transpose(const Bf16Matrix& matrix, std::size_t padded_rows, std::uint16_t* to);

// Numbers that are added to scaled scores, one for each; none if null.
struct ScoreMask {
  const float* numbers = nullptr;
  std::size_t stride = 0;  // from a row of scores to the next
};

// Which probabilities are dropped: bit k % 32 of bits[k / 32 * stride + q], for key k and query q of
// a block. None if null.
struct DroppedScores {
  const std::uint32_t* bits = nullptr;
  std::size_t stride = 0;
  float scale = 1;  // of the others
};

// Scores of consecutive queries (rows) and consecutive keys (columns).
struct ScoreBlock {
  float* scores;  // products of queries and keys; may be changed
  std::size_t queries;
  std::size_t keys;     // per row in memory
  float scale;          // positive
  std::ptrdiff_t seen;  // query r attends to min(most_seen, max(0, seen + r)) of these keys
  std::size_t most_seen;
  ScoreMask mask{};
  DroppedScores dropped{};
};

// The running statistics of each query's softmax over the blocks of keys.
struct SoftmaxRows {
  float* max;     // -inf at first
  float* sum;     // 0 at first
  float* output;  // (queries, columns), is multiplied by exp(old max - new max); null at first
  std::size_t columns;
};

// probabilities[r][k] = exp(scale * score + mask - max of the row so far), 0 for keys that the query
// does not attend to. The sum is of the values before they are dropped or scaled, and rounded to
// bf16.
void softmax_block(const ScoreBlock& block, const SoftmaxRows& rows, std::uint16_t* probabilities);

// to[r][c] = from[r][c] / sum[r], rows `stride` apart; 0 where the sum is 0.
void divide_rows(const float* from, std::size_t rows, std::size_t columns, const float* sum,
                 std::uint16_t* to, std::size_t stride);

// to[r] = sum over c of a[r][c] * b[r][c].
void dot_rows(const Bf16Matrix& a, const Bf16Matrix& b, float* to);

// ScoreMask with a row for each key.
struct TransposedScoreMask {
  const float* numbers = nullptr;
  std::size_t stride = 0;            // from a key to the next
  bool is_same_for_queries = false;  // each key has a single number
};

// Scores in the backward pass: keys are rows, queries are columns.
struct TransposedScores {
  // Becomes p = exp(scale * score + mask - max - log_sum of the query), and -p where it is dropped.
  float* scores;
  std::size_t keys;
  std::size_t padded_keys;  // even; the rows from `keys` on become 0
  std::size_t queries;      // per row in memory
  float scale;
  const float* max;        // of each query
  const float* log_sum;    // of each query; inf where there is none, which makes the result 0
  std::ptrdiff_t skipped;  // key r is not seen by the first max(0, skipped + r) queries
  TransposedScoreMask mask{};
  DroppedScores dropped{};
};

// probabilities[k][q]: the results, 0 where dropped and otherwise scaled, rounded.
void transposed_softmax(const TransposedScores& block, std::uint16_t* probabilities);

// The gradient of the products of queries and keys: |p| * (grad * kept_scale - delta of the query) *
// scale, where grad is 0 for a negative p, as rows[k][q], and as a right factor, pairs[k / 2][q].
struct ScoreGradients {
  const float* probabilities;  // (padded_keys, queries), as transposed_softmax leaves them
  const float* grad;           // of the probabilities after dropout and scaling
  const float* delta;
  std::size_t padded_keys;
  std::size_t queries;
  float scale;
  float kept_scale;
};
void score_gradients(const ScoreGradients& work, std::uint16_t* rows, Bf16Pair* pairs);

// to[r][c] = from[r][c], rows `stride` apart.
void round_rows(const float* from, std::size_t rows, std::size_t columns, std::uint16_t* to,
                std::size_t stride);

// to[r][c] = from[c][r], where a row of `from` has from_stride elements.
void round_transposed(const float* from, std::size_t from_stride, std::size_t rows,
                      std::size_t columns, std::uint16_t* to, std::size_t stride);

}  // namespace semitone::kernels
