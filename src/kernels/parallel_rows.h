#pragma once

#include "src/core/parallel_for.h"
#include "src/kernels/column_sums_kernel.h"
#include "src/kernels/flat.h"
#include "src/kernels/on_cuda.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

// Distributes the rows of a matrix over threads.
namespace semitone::kernels {

// Calls work(first row, last row) from several threads.
template <typename Work>
void for_all_rows(std::int64_t rows, std::int64_t columns, const Work& work) {
  parallel_for(0, rows, std::max<std::int64_t>(1, kGrain / columns),
               [&](std::int64_t begin, std::int64_t end) {
                 work(static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
               });
}

// Splits rows into parts, independently of the number of threads. The columns of each part are
// summed in fp32; then the parts are added in fp64, in order.
class RowParts {
 public:
  RowParts(std::int64_t rows, std::int64_t columns, bool on_cuda = false)
      : rows_(rows),
        columns_(columns),
        size_(std::clamp((rows + kParts - 1) / kParts, on_cuda ? kFewestOnCuda : kFewest, kMost)),
        count_((rows + size_ - 1) / size_) {}

  // Calls work(first row, last row, sums of this part). The sums are fp32 (values, columns) and not
  // initialised. Returns the sums over all parts, (values, columns).
  template <typename Work>
  at::Tensor add_up(std::int64_t values, const Work& work) const {
    const at::Tensor parts = at::empty({count_, values, columns_}, at::kFloat);
    auto* const data = parts.mutable_data_ptr<float>();
    const std::int64_t stride = values * columns_;
    parallel_for(0, count_, std::max<std::int64_t>(1, kGrain / (size_ * columns_)),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t part = begin; part < end; ++part) {
                     work(static_cast<std::size_t>(part * size_),
                          static_cast<std::size_t>(std::min(rows_, (part + 1) * size_)),
                          data + part * stride);
                   }
                 });
    at::Tensor sums = at::empty({values, columns_}, at::kFloat);
    auto* const result = sums.mutable_data_ptr<float>();
    parallel_for(0, stride, std::max<std::int64_t>(1, kGrain / count_),
                 [&](std::int64_t begin, std::int64_t end) {
                   add_up_parts(data, static_cast<std::size_t>(count_),
                                static_cast<std::size_t>(stride), static_cast<std::size_t>(begin),
                                static_cast<std::size_t>(end), result);
                 });
    return sums;
  }

  // The same on the device of `input`, where one call of work(rows per part, sums of all parts)
  // processes all parts. The sums are (parts, values, columns), or null if `values` is 0.
  template <typename Work>
  at::Tensor add_up_on_cuda(std::int64_t values, const at::Tensor& input, CudaStream stream,
                            const Work& work) const {
    const auto fp32 = at::TensorOptions(input.device()).dtype(at::kFloat);
    const at::Tensor parts = at::empty({count_, values, columns_}, fp32);
    work(static_cast<std::size_t>(size_), values == 0 ? nullptr : parts.mutable_data_ptr<float>());
    at::Tensor sums = at::empty({values, columns_}, fp32);
    if (values > 0) {
      add_up_parts_cuda(parts.const_data_ptr<float>(), static_cast<std::size_t>(count_),
                        static_cast<std::size_t>(values * columns_), sums.mutable_data_ptr<float>(),
                        stream);
    }
    return sums;
  }

 private:
  // The number of rows per part, small enough that many threads have work. At least 16: two sums
  // are then 8 % of the memory of three tensors of 16 bits, but of fewer than 4096 rows they are in
  // the caches (CUDA: at least 64). At most 256, since rounding errors have one sign where all terms
  // lack the same bits.
  static constexpr std::int64_t kParts = 64;
  static constexpr std::int64_t kFewest = 16;
  static constexpr std::int64_t kFewestOnCuda = 64;
  static constexpr std::int64_t kMost = 256;

  std::int64_t rows_;
  std::int64_t columns_;
  std::int64_t size_;
  std::int64_t count_;
};

}  // namespace semitone::kernels
