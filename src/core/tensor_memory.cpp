#include "src/core/tensor_memory.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace semitone {
namespace {

c10::DebugInfoKind place() {
  return c10::DebugInfoKind::PROFILER_STATE;
}

}  // namespace

// Lives as long as a thread's state refers to it. Without its meter it counts nothing.
class TensorMemoryMeter::Ledger : public c10::MemoryReportingInfoBase,
                                  public std::enable_shared_from_this<Ledger> {
 public:
  explicit Ledger(std::shared_ptr<Ledger> outer) : outer_(std::move(outer)) {}

  // The ledger to which this thread reports, or null: a profiler, or none.
  static Ledger* current_one() {
    return dynamic_cast<Ledger*>(c10::ThreadLocalDebugInfo::get(place()));
  }

  // A positive size: the block was allocated; a negative one: freed.
  void reportMemoryUsage(void* block, std::int64_t size, std::size_t allocated,
                         std::size_t reserved, c10::Device device) override {
    if (outer_ != nullptr) outer_->reportMemoryUsage(block, size, allocated, reserved, device);
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    // An address can appear again if another thread freed the block, which is not reported here.
    if (const auto known = blocks_.find(block); known != blocks_.end()) {
      current_ -= known->second;
      blocks_.erase(known);
    }
    if (size <= 0) return;
    blocks_.emplace(block, size);
    current_ += size;
    peak_ = std::max(peak_, current_);
  }

  bool memoryProfilingEnabled() const override {
    if (outer_ != nullptr && outer_->memoryProfilingEnabled()) return true;
    return !is_closed();
  }

  std::int64_t current() const {
    const std::lock_guard lock(mutex_);
    return current_;
  }
  std::int64_t peak() const {
    const std::lock_guard lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = current_;
  }

  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    blocks_.clear();
  }
  bool is_closed() const {
    const std::lock_guard lock(mutex_);
    return closed_;
  }

 private:
  const std::shared_ptr<Ledger> outer_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, std::int64_t> blocks_;
  std::int64_t current_ = 0;
  std::int64_t peak_ = 0;
  bool closed_ = false;
};

TensorMemoryMeter::TensorMemoryMeter() {
  Ledger* const outer = Ledger::current_one();
  // The profiler assumes that any object in this place is its own state, so never hide that.
  is_active_ = outer != nullptr || c10::ThreadLocalDebugInfo::get(place()) == nullptr;
  ledger_ = std::make_shared<Ledger>(outer == nullptr ? nullptr : outer->shared_from_this());
  if (is_active_) c10::ThreadLocalDebugInfo::_push(place(), ledger_);
}

// A thread's state can be removed from its top only. A ledger below another state stays there,
// closed, until that one ends.
TensorMemoryMeter::~TensorMemoryMeter() {
  ledger_->close();
  const Ledger* top = Ledger::current_one();
  for (; top != nullptr && top->is_closed(); top = Ledger::current_one()) {
    try {
      c10::ThreadLocalDebugInfo::_pop(place());
    } catch (const c10::Error&) {
      return;  // another kind of state is above it
    }
  }
}

bool TensorMemoryMeter::is_active() const {
  return is_active_;
}

std::int64_t TensorMemoryMeter::current_bytes() const {
  return ledger_->current();
}

std::int64_t TensorMemoryMeter::peak_bytes() const {
  return ledger_->peak();
}

void TensorMemoryMeter::reset_peak() {
  ledger_->reset_peak();
}

}  // namespace semitone
