#pragma once

#include "src/core/parallel_for.h"
#include "src/kernels/kernels.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// Tensors as flat memory, for tensor-level functions that call a kernel.
namespace semitone::kernels {

// Work is split into chunks of this many elements, so that one huge tensor and a thousand small
// ones are distributed evenly. 16 Ki fp32 elements are 64 KiB: input and output of a chunk fit in a
// 256 KiB L2 cache, and a few chunks (about 4 us each at 30 GB/s) make up for a thread's wake-up
// (about 5 us).
constexpr std::int64_t kChunk = 16 * 1024;
// Smallest number of elements per thread: 64 KiB of fp32, about 4 us of work.
constexpr std::int64_t kGrain = kChunk;

inline std::optional<Format> format_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Format::fp32;
    case at::kHalf:
      return Format::fp16;
    case at::kBFloat16:
      return Format::bf16;
    default:
      return std::nullopt;
  }
}

// Whether the elements of both have the same order without gaps, so that a kernel can process them
// as flat memory. A negative view would need a negation on the way.
inline bool same_flat_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.is_non_overlapping_and_dense() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         !a.is_neg() && !b.is_neg();
}

inline at::Tensor dense(const at::Tensor& tensor) {
  return tensor.resolve_neg().contiguous();
}

// The tensor in a dtype, on the device and in the memory order of the other tensor, which has no
// gaps.
inline at::Tensor laid_out_like(const at::Tensor& tensor, const at::Tensor& other,
                                at::ScalarType dtype) {
  if (tensor.scalar_type() == dtype && tensor.device() == other.device() &&
      same_flat_layout(tensor, other))
    return tensor;
  return at::empty_like(other, other.options().dtype(dtype)).copy_(tensor);
}

// Marks memory that a kernel writes, for autograd.
inline char* written_data(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  return static_cast<char*>(tensor.mutable_data_ptr());
}

// Parts of tensors, of at most kChunk elements each, grouped into chunks for threads: many small
// tensors that together make up a chunk are one unit of work. The grouping does not depend on the
// number of threads.
class Chunks {
 public:
  // Appends a part.
  void add(std::size_t size) {
    ++parts_;
    elements_ += size;
    if (elements_ >= static_cast<std::size_t>(kChunk)) end_chunk();
  }

  // Calls visit(index of the part) for every part, from several threads.
  template <typename Visit>
  void for_each(const Visit& visit) {
    if (parts_ > ends_.back()) end_chunk();
    parallel_for(1, static_cast<std::int64_t>(ends_.size()), 1,
                 [&](std::int64_t begin, std::int64_t end) {
                   const std::size_t last = ends_[static_cast<std::size_t>(end - 1)];
                   for (auto part = ends_[static_cast<std::size_t>(begin - 1)]; part < last; ++part)
                     visit(part);
                 });
  }

 private:
  void end_chunk() {
    ends_.push_back(parts_);
    elements_ = 0;
  }

  std::size_t parts_ = 0;
  std::size_t elements_ = 0;          // of the chunk that is being filled
  std::vector<std::size_t> ends_{0};  // chunk c holds the parts [ends_[c], ends_[c + 1])
};

// Small fp64 results on any devices, copied to the host with one read per device.
class ReadOnce {
 public:
  // Adds results under a number; all results of one ReadOnce have the same number of elements.
  void add(std::size_t number, const at::Tensor& results) {
    add(std::vector<std::size_t>{number}, results.reshape({1, -1}));
  }

  // Adds results under several numbers, one row for each.
  void add(const std::vector<std::size_t>& added, const at::Tensor& results) {
    auto& [numbers, tensors] = by_device_[results.device().str()];
    numbers.insert(numbers.end(), added.begin(), added.end());
    tensors.push_back(results);
  }

  // Calls visit(number, results) for everything that was added.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (const auto& [device, added] : by_device_) {
      const at::Tensor read = at::cat(added.second).cpu();
      for (std::size_t i = 0; i < added.first.size(); ++i)
        visit(added.first[i],
              read.const_data_ptr<double>() + static_cast<std::int64_t>(i) * read.size(1));
    }
  }

 private:
  std::map<std::string, std::pair<std::vector<std::size_t>, std::vector<at::Tensor>>> by_device_;
};

}  // namespace semitone::kernels
