#pragma once

#include "semitone/core/error.h"
#include "src/kernels/flat.h"
#include "src/kernels/multi_tensor_update.h"
#include "src/kernels/on_cuda.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <set>
#include <span>
#include <utility>
#include <vector>

// The parameters of a step as kernels take them. Tied parameters, which are different tensors with
// memory in common, are updated one after the other: a list is divided into launches, and all
// parameters of a launch are updated at once.
namespace semitone::kernels {

inline constexpr auto kUpdate = "kernels.multi_tensor_update";

// Error if a tensor has another shape, dtype or device than Update says.
void check_update(const Update& item, bool takes_bf16_state);

template <typename Rule>
void check_updates(std::span<const Update> items, std::span<const Rule> rules) {
  if (items.size() != rules.size()) {
    throw Error(kUpdate, "a rule for each parameter",
                c10::str(rules.size(), " for ", items.size()));
  }
  for (const Update& item : items) check_update(item, Rule::kTakesBf16State);
}

// Whether a kernel can process the tensors as flat memory.
bool fits_kernel(const Update& item);

// The memory of such an item. The kernel writes it: autograd's version counters are bumped.
UpdateSpan span_of(const Update& item);

// The elements [begin, begin + size) of a span.
UpdateSpan part_of(const UpdateSpan& whole, std::size_t begin, std::size_t size);

// The memory that a launch writes.
class WrittenMemory {
 public:
  bool holds(const UpdateSpan& span) const {
    return holds(range_of(span.param, span.param_format, span.size)) ||
           holds(range_of(span.copy, span.copy_format, span.size));
  }
  void add(const UpdateSpan& span) {
    ranges_.insert(range_of(span.param, span.param_format, span.size));
    if (span.copy != nullptr) ranges_.insert(range_of(span.copy, span.copy_format, span.size));
  }
  void clear() { ranges_.clear(); }

 private:
  using Range = std::pair<const std::byte*, const std::byte*>;  // begin and end

  static Range range_of(const void* memory, Format format, std::size_t size) {
    const auto* const begin = static_cast<const std::byte*>(memory);
    return {begin, begin == nullptr ? begin : begin + size * bytes_of(format)};
  }
  // The ranges have no element in common.
  bool holds(const Range& range) const {
    if (range.first == range.second) return false;
    const auto next = ranges_.lower_bound(range);
    return (next != ranges_.end() && next->first < range.second) ||
           (next != ranges_.begin() && std::prev(next)->second > range.first);
  }

  std::set<Range> ranges_;
};

// Launches on the CPU, which divide the memory into parts for threads.
template <typename Rule>
class CpuLaunches {
 public:
  void add(const Update& item, const Rule& rule) {
    const UpdateSpan whole = span_of(item);
    if (launches_.empty() || memory_.holds(whole)) {
      launches_.push_back({parts_.size(), {}});
      memory_.clear();
    }
    memory_.add(whole);
    for (std::size_t begin = 0; begin < whole.size; begin += kChunk) {
      const auto size = std::min<std::size_t>(kChunk, whole.size - begin);
      parts_.push_back({part_of(whole, begin, size), &rule});
      launches_.back().chunks.add(size);
    }
  }

  std::size_t parts() const { return parts_.size(); }

  // Calls visit(number of the part, its span, its rule) from several threads.
  template <typename Visit>
  void for_each(const Visit& visit) {
    for (Launch& launch : launches_) {
      launch.chunks.for_each([&](std::size_t i) {
        const std::size_t number = launch.first + i;
        visit(number, parts_[number].span, *parts_[number].rule);
      });
    }
  }

 private:
  struct Part {
    UpdateSpan span;
    const Rule* rule;
  };
  struct Launch {
    std::size_t first;  // of its parts
    Chunks chunks;
  };
  std::vector<Part> parts_;
  std::vector<Launch> launches_;
  WrittenMemory memory_;  // of the last launch
};

// Launches on CUDA devices. A launch is on one device.
template <typename Rule>
class CudaLaunches {
 public:
  void add(std::size_t number, const Update& item, const Rule& rule) {
    const UpdateSpan whole = span_of(item);
    if (launches_.empty() || memory_.holds(whole) ||
        !same_device(item.param, launches_.back().param)) {
      launches_.push_back({item.param, {}, {}, {}});
      memory_.clear();
    }
    memory_.add(whole);
    launches_.back().numbers.push_back(number);
    launches_.back().spans.push_back(whole);
    launches_.back().rules.push_back(rule);
  }

  // Calls visit(a parameter of the launch, numbers of its items, step, stream).
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (const Launch& launch : launches_) {
      const CurrentCuda cuda(launch.param);
      visit(launch.param, launch.numbers,
            CudaStep<Rule>{.spans = launch.spans, .rules = launch.rules}, cuda.stream());
    }
  }

 private:
  struct Launch {
    at::Tensor param;  // one of them
    std::vector<std::size_t> numbers;
    std::vector<UpdateSpan> spans;
    std::vector<Rule> rules;
  };
  std::vector<Launch> launches_;
  WrittenMemory memory_;  // of the last launch
};

}  // namespace semitone::kernels
