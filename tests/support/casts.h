#pragma once

#include "semitone/core/events.h"

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// The conversions of autocast, as a listener receives them.
namespace semitone::test {

class CastRecorder : public events::Listener {
 public:
  struct Heard {
    std::string op;
    c10::ScalarType from;
    c10::ScalarType to;
    std::int64_t numel;
    bool cached;
  };

  using events::Listener::on;
  void on(const events::Cast& cast) override {
    const std::lock_guard lock(mutex_);
    heard_.push_back({std::string(cast.op), cast.from, cast.to, cast.numel, cast.cached});
  }

  std::vector<Heard> heard() const {
    const std::lock_guard lock(mutex_);
    return heard_;
  }

  // Casts of tensors with this many elements: computed ones, and ones taken from the cache.
  std::size_t computed(std::int64_t numel) const { return count(numel, false); }
  std::size_t cached(std::int64_t numel) const { return count(numel, true); }

  void clear() {
    const std::lock_guard lock(mutex_);
    heard_.clear();
  }

 private:
  std::size_t count(std::int64_t numel, bool cached) const {
    const std::lock_guard lock(mutex_);
    std::size_t found = 0;
    for (const Heard& cast : heard_) found += cast.numel == numel && cast.cached == cached ? 1 : 0;
    return found;
  }

  mutable std::mutex mutex_;
  std::vector<Heard> heard_;
};

// Records the casts of this thread until the end of the scope.
class CastRecording {
 public:
  CastRecorder* operator->() const { return recorder_.get(); }

 private:
  std::shared_ptr<CastRecorder> recorder_ = std::make_shared<CastRecorder>();
  events::Listen listen_{recorder_};
};

}  // namespace semitone::test
