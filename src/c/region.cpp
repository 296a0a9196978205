#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"
#include "src/c/arguments.h"
#include "src/c/handles.h"
#include "src/c/policy.h"

#include <memory>
#include <optional>
#include <thread>
#include <utility>

using semitone::Error;
using semitone::amp::Autocast;
using namespace semitone::c;  // NOLINT(google-build-using-namespace)

struct SemitoneRegion {
  static constexpr const char* kType = "SemitoneRegion";
  // Constructed in place, since it can neither be copied nor moved.
  std::optional<Autocast> autocast = std::nullopt;
  std::thread::id thread = std::this_thread::get_id();
  SemitoneRegion* outer = nullptr;  // that was entered before it
};

namespace semitone::c {
namespace {

// The region of this thread that was entered last. Without a destructor: a program may end a region
// in the destructor of an object of the thread.
thread_local SemitoneRegion* innermost = nullptr;

template <typename... Arguments>
void enter(SemitoneRegion** result, const Arguments&... arguments) {
  auto region = std::make_unique<SemitoneRegion>();
  region->autocast.emplace(arguments...);
  region->outer = innermost;
  SemitoneRegion* const entered = region.get();
  give(std::move(region), result);
  innermost = entered;
}

}  // namespace
}  // namespace semitone::c

SemitoneStatus semitone_region_enter(const SemitonePolicy* policy, SemitoneRegion** region) {
  return run(__func__, [&](const char* function) {
    require_pointer(region, "pointer for the region", function);
    enter(region, get(policy, function).policy);
  });
}

SemitoneStatus semitone_region_enter_disabled(const char* device, SemitoneRegion** region) {
  return run(__func__, [&](const char* function) {
    require_pointer(region, "pointer for the region", function);
    enter(region, device_of(device, function).type(), std::optional<at::ScalarType>(), false);
  });
}

SemitoneStatus semitone_region_exit(SemitoneRegion* region) {
  return run(__func__, [&](const char* function) {
    const SemitoneRegion& self = get(region, function);
    if (self.thread != std::this_thread::get_id()) {
      throw Error(function, "the thread that entered the region", "another thread",
                  "end the region where it began");
    }
    if (innermost != region) {
      throw Error(function, "the region of this thread that was entered last",
                  "one that was entered before another", "end the regions inside it first");
    }
    innermost = self.outer;
    remove_handle(region);
    delete region;
  });
}

SemitoneStatus semitone_region_is_active(const char* device, int32_t* is_active) {
  return run(__func__, [&](const char* function) {
    require_pointer(is_active, "pointer for the result", function);
    *is_active = semitone::amp::autocast_enabled(device_of(device, function).type()) ? 1 : 0;
  });
}

SemitoneStatus semitone_clear_cast_cache() {
  return run(__func__, [&](const char*) { semitone::amp::clear_cast_cache(); });
}
