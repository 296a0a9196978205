#include "src/report/forward_memory.h"

#include <algorithm>

namespace semitone::report {

void ForwardMemory::add(const c10::Storage& storage) {
  if (!storage) return;
  made_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
  has_news_ = true;
}

void ForwardMemory::backward_began() {
  if (!has_news_) return;
  has_news_ = false;
  std::int64_t bytes = 0;
  for (auto entry = made_.begin(); entry != made_.end();) {
    const auto storage = entry->second.lock();
    if (storage.defined()) {
      bytes += static_cast<std::int64_t>(storage->nbytes());
      ++entry;
    } else {
      entry = made_.erase(entry);
    }
  }
  bytes_ = std::max(bytes_, bytes);
}

}  // namespace semitone::report
