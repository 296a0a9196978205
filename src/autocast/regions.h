#pragma once

#include "src/autocast/cast_cache.h"
#include "src/autocast/compiled_policy.h"
#include "src/core/thread_state.h"

#include <ATen/autocast_mode.h>
#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace semitone::amp {

// The regions of a thread: for each device the innermost one, and the cache that they share.
// Immutable: a new region makes a new object. at::ThreadLocalState carries it to other threads.
struct Regions : c10::DebugInfoBase {
  struct Region {
    c10::DeviceType device;
    c10::ScalarType dtype;
    std::shared_ptr<const CompiledPolicy> policy;  // null: casts are off
  };
  using List = c10::SmallVector<Region, 2>;

  List innermost;
  std::shared_ptr<CastCache> cache;

  const Region* find(c10::DeviceType device) const {
    for (const Region& region : innermost) {
      if (region.device == device) return &region;
    }
    return nullptr;
  }

  static const Regions* current() {
    return static_cast<const Regions*>(c10::ThreadLocalDebugInfo::get(kAutocastState));
  }

  // The region of a device if casts are on there: not in a disabled one, nor under DisableCasts.
  const Region* find_active(c10::DeviceType device) const {
    const Region* region = find(device);
    const bool active =
        region != nullptr && region->policy != nullptr && at::autocast::is_autocast_enabled(device);
    return active ? region : nullptr;
  }
};

}  // namespace semitone::amp
