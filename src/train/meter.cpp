#include "src/train/meter.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

namespace semitone::train {

void StepMeter::add(double seconds, std::int64_t items) {
  seconds_.push_back(seconds);
  total_seconds_ += seconds;
  items_ += items;
}

double StepMeter::mean_ms() const {
  return seconds_.empty() ? 0 : 1e3 * total_seconds_ / static_cast<double>(seconds_.size());
}

double StepMeter::median_ms() const {
  if (seconds_.empty()) return 0;
  std::vector<double> sorted = seconds_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  if (sorted.size() % 2 == 1) return 1e3 * *middle;
  return 1e3 * (*middle + *std::max_element(sorted.begin(), middle)) / 2;
}

double StepMeter::items_per_second() const {
  return total_seconds_ > 0 ? static_cast<double>(items_) / total_seconds_ : 0;
}

std::int64_t peak_rss_bytes() {
  // Not getrusage: its maximum includes the parent's, from between fork and exec.
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    std::int64_t kilobytes = 0;
    if (word == "VmHWM:" && status >> kilobytes) return 1024 * kilobytes;
  }
  return 0;
}

namespace {

class Ledger : public c10::MemoryReportingInfoBase {
 public:
  explicit Ledger(Ledger* outer) : outer_(outer) {}

  // A positive size: the block was allocated; a negative one: freed.
  void reportMemoryUsage(void* block, std::int64_t size, std::size_t allocated,
                         std::size_t reserved, c10::Device device) override {
    if (outer_ != nullptr) outer_->reportMemoryUsage(block, size, allocated, reserved, device);
    const std::lock_guard lock(mutex_);
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

  bool memoryProfilingEnabled() const override { return true; }

  std::int64_t current() const {
    const std::lock_guard lock(mutex_);
    return current_;
  }
  std::int64_t peak() const {
    const std::lock_guard lock(mutex_);
    return peak_;
  }

 private:
  Ledger* outer_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, std::int64_t> blocks_;
  std::int64_t current_ = 0;
  std::int64_t peak_ = 0;
};

}  // namespace

struct TensorMemoryMeter::Impl {
  std::shared_ptr<Ledger> ledger;
  std::optional<c10::DebugInfoGuard> guard;
};

TensorMemoryMeter::TensorMemoryMeter() : impl_(std::make_unique<Impl>()) {
  const c10::DebugInfoKind place = c10::DebugInfoKind::PROFILER_STATE;
  auto* const there = c10::ThreadLocalDebugInfo::get(place);
  auto* const outer = dynamic_cast<Ledger*>(there);
  impl_->ledger = std::make_shared<Ledger>(outer);
  // The profiler assumes that any object in this place is its own state, so never hide that.
  if (there == nullptr || outer != nullptr) impl_->guard.emplace(place, impl_->ledger);
}

TensorMemoryMeter::~TensorMemoryMeter() = default;

bool TensorMemoryMeter::is_active() const {
  return impl_->guard.has_value();
}

std::int64_t TensorMemoryMeter::current_bytes() const {
  return impl_->ledger->current();
}

std::int64_t TensorMemoryMeter::peak_bytes() const {
  return impl_->ledger->peak();
}

}  // namespace semitone::train
