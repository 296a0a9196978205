#pragma once

#include "src/core/parallel_for.h"
#include "src/kernels/attention_kernel.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/BFloat16.h>

#include <hwy/aligned_allocator.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>

// What the two passes of attention share: products of blocks, and memory.
namespace semitone::kernels::blocked_attention {

using Bits = std::uint16_t;  // of a bf16

// The numbers of queries and keys of a block. Scores of 64 x 512 take 128 KiB forward. Backward,
// scores, their gradient and three copies in bf16 take 112 KiB.
constexpr std::int64_t kQueries = 64;
constexpr std::int64_t kKeys = 512;
constexpr std::int64_t kKeysBackward = 128;
// Sizes of products are multiples of this, so that oneDNN compiles few kernels.
constexpr std::int64_t kMultiple = 16;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline std::int64_t padded(std::int64_t size) {
  return (size + kMultiple - 1) / kMultiple * kMultiple;
}

// The left factor of a product.
struct Left {
  const Bits* data;
  std::int64_t stride;
  std::int64_t rows;
};

// The right factor, packed in pairs of rows (pack_rows).
struct Right {
  const Bf16Pair* data;
  std::int64_t stride;  // the number of columns in memory
  std::int64_t columns;
};

enum class Write : bool { replace, add };

// c = a b, or c += b. c is fp32 without gaps, `depth` the number of the left factor's columns.
inline void multiply(const Left& a, const Right& b, std::int64_t depth, float* c, Write write) {
  at::native::cpublas::brgemm(a.rows, b.columns, depth, a.stride, b.stride, b.columns,
                              write == Write::add, reinterpret_cast<const at::BFloat16*>(a.data),
                              reinterpret_cast<const at::BFloat16*>(b.data), c, /*is_vnni=*/true);
}

// Releases the AMX tiles that oneDNN keeps configured for this thread.
struct ReleaseTiles {
  ReleaseTiles() = default;
  ~ReleaseTiles() { at::native::cpublas::brgemm_release(/*is_vnni=*/true); }
  ReleaseTiles(const ReleaseTiles&) = delete;
  ReleaseTiles& operator=(const ReleaseTiles&) = delete;
};

// (N, heads, rows, D) in bf16, each row without gaps.
class Heads {
 public:
  explicit Heads(const at::Tensor& tensor)
      : tensor_(is_readable(tensor) ? tensor : tensor.resolve_neg().contiguous()),
        data_(reinterpret_cast<Bits*>(const_cast<void*>(tensor_.const_data_ptr()))) {}

  // Some rows of a head.
  Bf16Matrix rows(std::int64_t batch, std::int64_t head, std::int64_t first,
                  std::int64_t count) const {
    return {data_ + offset(batch, head, first), static_cast<std::size_t>(count),
            static_cast<std::size_t>(tensor_.size(3)), static_cast<std::size_t>(stride())};
  }

  // For a tensor that was made to be written.
  Bits* at(std::int64_t batch, std::int64_t head, std::int64_t row) const {
    return data_ + offset(batch, head, row);
  }

  std::int64_t stride() const { return tensor_.stride(2); }

 private:
  // oneDNN divides by 0 if the rows of a product span 2 GiB or more.
  static bool is_readable(const at::Tensor& tensor) {
    constexpr std::int64_t kMostRows = std::max(kQueries, kKeysBackward);
    constexpr std::int64_t kMostStride = std::numeric_limits<std::int32_t>::max() / (2 * kMostRows);
    return !tensor.is_neg() && tensor.stride(3) == 1 && tensor.stride(2) >= tensor.size(3) &&
           tensor.stride(2) <= kMostStride;
  }

  std::int64_t offset(std::int64_t batch, std::int64_t head, std::int64_t row) const {
    return batch * tensor_.stride(0) + head * tensor_.stride(1) + row * tensor_.stride(2);
  }

  at::Tensor tensor_;
  Bits* data_;
};

// (N, heads, rows, D), stored as (N, rows, heads, D). Not a view: it may be changed in place.
inline at::Tensor empty_like_heads(const at::Tensor& tensor) {
  const std::int64_t size = tensor.size(3);
  const std::int64_t row = tensor.size(1) * size;
  return at::empty_strided(tensor.sizes(), {tensor.size(2) * row, size, row, 1}, tensor.options());
}

template <typename T>
using Memory = hwy::AlignedFreeUniquePtr<T[]>;

template <typename T>
Memory<T> memory(std::int64_t size) {
  if (size == 0) return nullptr;
  auto result = hwy::AllocateAligned<T>(static_cast<std::size_t>(size));
  if (result == nullptr) throw std::bad_alloc();
  return result;
}

// The sizes of a call.
struct Shape {
  Shape(const at::Tensor& query, const at::Tensor& key)
      : batch(query.size(0)),
        heads(query.size(1)),
        key_heads(key.size(1)),
        queries(query.size(2)),
        keys(key.size(2)),
        size(query.size(3)) {}

  std::int64_t group() const { return heads / key_heads; }
  std::int64_t blocks() const { return (queries + kQueries - 1) / kQueries; }

  std::int64_t batch;
  std::int64_t heads;
  std::int64_t key_heads;
  std::int64_t queries;
  std::int64_t keys;
  std::int64_t size;  // of a head
};

// Rows as the left factor of a product, in a number that is a multiple of kMultiple: read in place,
// or a copy with rows of zeros.
class PaddedRows {
 public:
  PaddedRows(std::int64_t most, std::int64_t columns)
      : copy_(memory<Bits>(most * columns)), columns_(columns) {}

  // The rows are valid until the next call.
  const Left& read(const Bf16Matrix& matrix) {
    const auto count = static_cast<std::int64_t>(matrix.rows);
    left_ = {matrix.data, static_cast<std::int64_t>(matrix.stride), padded(count)};
    if (left_.rows == count) return left_;
    for (std::int64_t row = 0; row < count; ++row)
      std::copy_n(matrix.data + row * left_.stride, columns_, copy_.get() + row * columns_);
    std::fill_n(copy_.get() + count * columns_, (left_.rows - count) * columns_, Bits{0});
    left_.data = copy_.get();
    left_.stride = columns_;
    return left_;
  }

  const Left& left() const { return left_; }

 private:
  Memory<Bits> copy_;
  std::int64_t columns_;
  Left left_{};
};

}  // namespace semitone::kernels::blocked_attention
