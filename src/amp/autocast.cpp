#include "semitone/amp/autocast.h"

#include "semitone/core/device.h"
#include "semitone/core/error.h"
#include "src/amp/regions.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace semitone::amp {
namespace {

using Region = Regions::Region;

// The regions of this thread with one of them replaced.
std::shared_ptr<Regions> with(const Region& region) {
  auto regions = std::make_shared<Regions>();
  if (const Regions* outer = Regions::current()) {
    regions->innermost = outer->innermost;
    regions->cache = outer->cache;
  } else {
    regions->cache = std::make_shared<CastCache>();
  }
  for (Region& existing : regions->innermost) {
    if (existing.device != region.device) continue;
    existing = region;
    return regions;
  }
  regions->innermost.push_back(region);
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

// TorchScript's optimizer differentiates whole graphs by itself, and fuses operators past the
// dispatcher, both with dtypes that it takes from the graph and not from the policy. In a region
// operators run one by one; the flag is the thread's own.
using PlainTorchScript = torch::jit::GraphOptimizerEnabledGuard;

}  // namespace

struct Autocast::Guard {
  explicit Guard(const Region& region) : switches(region), info(kAutocastState, with(region)) {
    if (region.policy != nullptr) plain.emplace(false);
  }
  Switches switches;
  c10::DebugInfoGuard info;
  std::optional<PlainTorchScript> plain;
};

Autocast::Autocast(const CastPolicy& policy) {
  if (!policy.fp32_param_globs().empty() && !policy.is_bound()) {
    throw Error("amp.autocast", "a policy that knows the model whose parameters it keeps in fp32",
                "'" + policy.fp32_param_globs().front() + "' in a policy that is not bound",
                "Autocast region(policy.bind(model))");
  }
  guard_ = std::make_unique<Guard>(Region{policy.device(), policy.dtype(), policy.compiled()});
}

Autocast::Autocast(c10::DeviceType device, std::optional<c10::ScalarType> dtype, bool enabled) {
  const CastTarget target(device, dtype.value_or(default_16bit_dtype(device)));
  guard_ = std::make_unique<Guard>(
      Region{device, target.dtype, enabled ? CastPolicy::semitone(target).compiled() : nullptr});
}

Autocast::~Autocast() = default;

struct DisableCasts::Guard {
  c10::impl::ExcludeDispatchKeyGuard excluded{c10::autocast_dispatch_keyset};
};

DisableCasts::DisableCasts() : guard_(std::make_unique<Guard>()) {}
DisableCasts::~DisableCasts() = default;

bool autocast_enabled(c10::DeviceType device) {
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device))
    return false;
  const Regions* regions = Regions::current();
  const Region* region = regions == nullptr ? nullptr : regions->find(device);
  return region == nullptr || region->policy == nullptr || region->policy->casts();
}

c10::ScalarType autocast_dtype(c10::DeviceType device) {
  const Regions* regions = Regions::current();
  const Region* region = regions == nullptr ? nullptr : regions->find(device);
  return region == nullptr ? default_16bit_dtype(device) : region->dtype;
}

void clear_cast_cache() {
  if (const Regions* regions = Regions::current()) regions->cache->clear();
}

// The cache is not kept alive: it dies with the outermost region, also where a graph that waits for
// its backward pass holds the state.
struct AutocastState::Data {
  Regions::List active;
  std::weak_ptr<CastCache> cache;
};

struct AutocastState::Scope::Guard {
  explicit Guard(const Data& data) {
    for (const Region& region : data.active) switches.emplace_back(region);
    auto regions = std::make_shared<Regions>();
    regions->innermost = data.active;
    regions->cache = data.cache.lock();
    if (regions->cache == nullptr) regions->cache = std::make_shared<CastCache>();
    info.emplace(kAutocastState, std::move(regions));
    if (!data.active.empty()) plain.emplace(false);
  }
  c10::impl::ExcludeDispatchKeyGuard all_off{c10::autocast_dispatch_keyset};
  std::list<Switches> switches;  // one a device: their order does not matter
  std::optional<c10::DebugInfoGuard> info;
  std::optional<PlainTorchScript> plain;
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
  if (const Regions* regions = Regions::current()) {
    for (const Region& region : regions->innermost) {
      if (regions->find_active(region.device) != nullptr) data->active.push_back(region);
    }
    data->cache = regions->cache;
  }
  return AutocastState(std::move(data));
}

AutocastState AutocastState::disabled() {
  return AutocastState(std::make_shared<Data>());
}

AutocastState AutocastState::without_casts() const {
  auto data = std::make_shared<Data>();
  data->cache = data_->cache;
  for (const Region& region : data_->active) {
    if (!region.policy->emulates_any() && !region.policy->repairs()) continue;
    data->active.push_back({region.device, region.dtype, region.policy->without_casts()});
  }
  return AutocastState(std::move(data));
}

AutocastState::Scope AutocastState::enter() const {
  return Scope(std::make_unique<Scope::Guard>(*data_));
}

}  // namespace semitone::amp
