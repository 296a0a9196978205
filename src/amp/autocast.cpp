#include "semitone/amp/autocast.h"

#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/amp/regions.h"

#include <ATen/autocast_mode.h>

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

using Region = Regions::Region;

// The regions of this thread with some of them replaced.
std::shared_ptr<Regions> with(c10::ArrayRef<Region> changed) {
  auto regions = std::make_shared<Regions>();
  if (const Regions* outer = Regions::current()) {
    regions->innermost = outer->innermost;
    regions->cache = outer->cache;
  } else {
    regions->cache = std::make_shared<CastCache>();
  }
  for (const Region& region : changed) {
    bool replaced = false;
    for (Region& existing : regions->innermost) {
      if (existing.device != region.device) continue;
      existing = region;
      replaced = true;
    }
    if (!replaced) regions->innermost.push_back(region);
  }
  return regions;
}

// LibTorch's thread-local switches for one device, set as a region wants them and restored in the
// end.
class Switches {
 public:
  explicit Switches(const Region& region)
      : device_(region.device),
        was_enabled_(at::autocast::is_autocast_enabled(region.device)),
        dtype_before_(at::autocast::get_autocast_dtype(region.device)) {
    at::autocast::set_autocast_enabled(device_, region.policy != nullptr);
    at::autocast::set_autocast_dtype(device_, region.dtype);
  }
  ~Switches() {
    at::autocast::set_autocast_dtype(device_, dtype_before_);
    at::autocast::set_autocast_enabled(device_, was_enabled_);
  }
  Switches(const Switches&) = delete;
  Switches& operator=(const Switches&) = delete;

 private:
  c10::DeviceType device_;
  bool was_enabled_;
  c10::ScalarType dtype_before_;
};

void check_device(c10::DeviceType device) {
  if (!at::autocast::is_autocast_available(device)) {
    throw Error("amp.autocast", "a device that LibTorch has autocast for",
                c10::DeviceTypeName(device, true));
  }
}

// Default policies are made once: a region is entered at every step.
std::shared_ptr<const CompiledPolicy> default_policy(c10::DeviceType device,
                                                     c10::ScalarType dtype) {
  static std::mutex mutex;
  static auto* const made = new std::map<std::pair<c10::DeviceType, c10::ScalarType>, CastPolicy>;
  const std::lock_guard lock(mutex);
  auto found = made->find({device, dtype});
  if (found == made->end())
    found = made->emplace(std::pair(device, dtype), CastPolicy::semitone({device, dtype})).first;
  return found->second.compiled();
}

}  // namespace

struct Autocast::Guard {
  explicit Guard(const Region& region) : switches(region), info(kAutocastState, with(region)) {}
  Switches switches;
  c10::DebugInfoGuard info;
};

Autocast::Autocast(const CastPolicy& policy) {
  check_device(policy.device());
  guard_ = std::make_unique<Guard>(Region{policy.device(), policy.dtype(), policy.compiled()});
}

Autocast::Autocast(c10::DeviceType device, std::optional<c10::ScalarType> dtype, bool enabled) {
  check_device(device);
  const CastTarget target(device, dtype.value_or(default_16bit_dtype(device)));
  guard_ = std::make_unique<Guard>(
      Region{device, target.dtype, enabled ? default_policy(device, target.dtype) : nullptr});
}

Autocast::~Autocast() = default;

struct DisableCasts::Guard {
  c10::impl::ExcludeDispatchKeyGuard excluded{c10::autocast_dispatch_keyset};
};

DisableCasts::DisableCasts() : guard_(std::make_unique<Guard>()) {}
DisableCasts::~DisableCasts() = default;

bool autocast_enabled(c10::DeviceType device) {
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
}

c10::ScalarType autocast_dtype(c10::DeviceType device) {
  const Regions* regions = Regions::current();
  const Region* region = regions == nullptr ? nullptr : regions->find(device);
  return region == nullptr ? default_16bit_dtype(device) : region->dtype;
}

void clear_cast_cache() {
  if (const Regions* regions = Regions::current()) regions->cache->clear();
}

struct AutocastState::Data {
  std::shared_ptr<const Regions> regions;  // null: no region
};

struct AutocastState::Scope::Guard {
  explicit Guard(c10::ArrayRef<Region> regions) {
    for (const Region& region : regions) switches.emplace_back(region);
    info.emplace(kAutocastState, with(regions));
  }
  std::list<Switches>
      switches;  // destroyed after info, in an order that does not matter: one a device
  std::optional<c10::DebugInfoGuard> info;
};

AutocastState::Scope::Scope(std::unique_ptr<Guard> guard) : guard_(std::move(guard)) {}
AutocastState::Scope::Scope(Scope&&) noexcept = default;
AutocastState::Scope::~Scope() = default;

AutocastState::AutocastState(std::shared_ptr<const Data> data) : data_(std::move(data)) {}
AutocastState::AutocastState(const AutocastState&) = default;
AutocastState& AutocastState::operator=(const AutocastState&) = default;
AutocastState::AutocastState(AutocastState&&) noexcept = default;
AutocastState& AutocastState::operator=(AutocastState&&) noexcept = default;
AutocastState::~AutocastState() = default;

AutocastState AutocastState::current() {
  auto data = std::make_shared<Data>();
  if (const Regions* regions = Regions::current()) data->regions = regions->shared_from_this();
  return AutocastState(std::move(data));
}

AutocastState AutocastState::disabled() {
  return AutocastState(std::make_shared<Data>());
}

AutocastState::Scope AutocastState::enter() const {
  std::vector<Region> regions;
  if (data_->regions != nullptr)
    regions.assign(data_->regions->innermost.begin(), data_->regions->innermost.end());
  // A device that this thread is in a region of, and the state is not: off, as it was there.
  if (const Regions* here = Regions::current()) {
    for (const Region& region : here->innermost) {
      const bool known =
          data_->regions != nullptr && data_->regions->find(region.device) != nullptr;
      if (!known) regions.push_back({region.device, region.dtype, nullptr});
    }
  }
  return Scope(std::make_unique<Scope::Guard>(regions));
}

}  // namespace semitone::amp
