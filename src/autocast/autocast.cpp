#include "semitone/autocast/autocast.h"

#include "semitone/core/device.h"
#include "semitone/core/error.h"
#include "src/autocast/custom_backward.h"
#include "src/autocast/regions.h"
#include "src/core/log.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

using Region = Regions::Region;

const Regions* as_regions(const c10::DebugInfoBase* info) {
  return static_cast<const Regions*>(info);
}

// The enclosing regions with one of them replaced.
std::shared_ptr<Regions> with(const Region& region, const Regions* outer) {
  auto regions = std::make_shared<Regions>();
  if (outer != nullptr) {
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

// LibTorch's thread-local switches for one device.
struct Switches {
  explicit Switches(c10::DeviceType of)
      : device(of),
        enabled(at::autocast::is_autocast_enabled(of)),
        dtype(at::autocast::get_autocast_dtype(of)) {}
  void set() const {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
  }

  c10::DeviceType device;
  bool enabled;
  c10::ScalarType dtype;
};

// Applies regions to this thread until the end of the scope, and sets LibTorch's switches
// accordingly.
//
// TorchScript's optimizer differentiates whole graphs itself, and fuses operators without the
// dispatcher. For both it uses dtypes from the graph, not from the policy. In a region operators
// therefore run one by one; the flag is thread-local.
//
// LibTorch has its own process-wide cache of weight casts, which kernels of other libraries fill by
// at::autocast::cached_cast, as do some of LibTorch's that run in Semitone's regions. It does not
// notice changes of weights. It is emptied where Python's torch.autocast empties it, at the end of
// the outermost region, and whenever Semitone's cache is emptied.
//
// A scope that ends on another thread stays in force on its own thread, which ends it when another
// scope begins or ends there.
class RegionScope {
 public:
  struct End {
    void operator()(RegionScope* scope) const {
      if (scope->thread_ == &innermost()) {
        delete scope;
        return;
      }
      log()->error(
          "[amp.autocast] expected a region to end on the thread that it began on, got another "
          "thread — the region stays in force there until the next one begins");
      scope->is_abandoned_ = true;
    }
  };
  using Handle = std::unique_ptr<RegionScope, End>;

  static Handle begin(const Regions::List& regions, ThreadStateGuard::Make make) {
    end_abandoned();
    return Handle(new RegionScope(regions, std::move(make)));
  }

  // Without casts on any device, in the regions as they are.
  static Handle begin_without_casts() {
    end_abandoned();
    return Handle(new RegionScope());
  }

  RegionScope(const RegionScope&) = delete;
  RegionScope& operator=(const RegionScope&) = delete;

 private:
  RegionScope()
      : is_outermost_(false),
        outer_had_gradients_(custom_backward::begun_with_gradients()),
        outer_(innermost()) {
    for (const c10::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
      if (!at::autocast::is_autocast_enabled(device)) continue;
      before_.emplace_back(device);
      at::autocast::set_autocast_enabled(device, false);
    }
    innermost() = this;
  }

  RegionScope(const Regions::List& regions, ThreadStateGuard::Make make)
      : is_outermost_(Regions::current() == nullptr),
        outer_had_gradients_(
            std::exchange(custom_backward::begun_with_gradients(), c10::GradMode::is_enabled())),
        outer_(innermost()) {
    for (const Region& region : regions) switch_to(region);
    info_.emplace(kAutocastState, std::move(make));
    innermost() = this;
  }

  ~RegionScope() {
    if (innermost() != this) end_abandoned();  // inside this one
    if (info_.has_value()) info_->end();
    if (innermost() == this) {
      innermost() = outer_;
      custom_backward::begun_with_gradients() = outer_had_gradients_;
      for (const Switches& switches : before_) switches.set();
      if (script_before_.has_value()) torch::jit::setGraphExecutorOptimize(*script_before_);
      if (is_outermost_) at::autocast::clear_cache();
      end_abandoned();
    } else {
      hand_over();
      static std::once_flag said;
      std::call_once(said, [] {
        log()->warn(
            "[amp.autocast] expected regions to end in the reverse order of their construction, "
            "got one that ended before a region inside it — the inner one stays in force; this is "
            "logged once");
      });
    }
  }

  static void end_abandoned() {
    while (innermost() != nullptr && innermost()->is_abandoned_) delete innermost();
  }

  static RegionScope*& innermost() {
    static thread_local RegionScope* scope = nullptr;
    return scope;
  }

  void switch_to(const Region& region) {
    before_.emplace_back(region.device);
    at::autocast::set_autocast_enabled(region.device, region.policy != nullptr);
    at::autocast::set_autocast_dtype(region.device, region.dtype);
    if (region.policy == nullptr || script_before_.has_value()) return;
    script_before_ = torch::jit::getGraphExecutorOptimize();
    torch::jit::setGraphExecutorOptimize(false);
  }

  // The next scope inside this one restores what this one would restore. If there is none, it is
  // restored now.
  void hand_over() {
    RegionScope* inside = innermost();
    std::vector<RegionScope*> inner;  // from the innermost outwards
    for (; inside != nullptr && inside != this; inside = inside->outer_) inner.push_back(inside);
    if (inside == nullptr) return;
    inner.back()->outer_ = outer_;
    inner.back()->outer_had_gradients_ = outer_had_gradients_;
    inner.back()->is_outermost_ = inner.back()->is_outermost_ || is_outermost_;
    for (const Switches& switches : before_) {
      bool handed = false;
      for (auto scope = inner.rbegin(); scope != inner.rend() && !handed; ++scope) {
        for (Switches& theirs : (*scope)->before_) {
          if (theirs.device != switches.device) continue;
          theirs = switches;
          handed = true;
        }
      }
      if (!handed) switches.set();
    }
    if (!script_before_.has_value()) return;
    for (auto scope = inner.rbegin(); scope != inner.rend(); ++scope) {
      if (!(*scope)->script_before_.has_value()) continue;
      (*scope)->script_before_ = script_before_;
      return;
    }
    torch::jit::setGraphExecutorOptimize(*script_before_);
  }

  RegionScope** thread_ = &innermost();  // identifies it
  std::atomic<bool> is_abandoned_{false};
  bool is_outermost_;
  bool outer_had_gradients_;
  RegionScope* outer_;
  c10::SmallVector<Switches, 2> before_;
  std::optional<bool> script_before_;
  std::optional<ThreadStateGuard> info_;
};

// As in Python's torch.autocast, nothing is cast in such a region: operators on the CPU run in
// fp32.
void warn_without_device(c10::DeviceType device) {
  if (device != c10::DeviceType::CUDA || at::hasCUDA()) return;
  static std::once_flag said;
  std::call_once(said, [] {
    log()->warn(
        "[amp.autocast] expected a GPU for a region of CUDA operators, got none — nothing is cast "
        "in it; amp::Autocast region(semitone::default_device()) works on every machine; this is "
        "logged once");
  });
}

}  // namespace

struct Autocast::Guard {
  explicit Guard(const Region& region)
      : scope(RegionScope::begin({region}, [region](const c10::DebugInfoBase* outer) {
          return with(region, as_regions(outer));
        })) {}
  RegionScope::Handle scope;
};

Autocast::Autocast(const CastPolicy& policy) {
  if (!policy.fp32_param_globs().empty() && !policy.is_bound()) {
    throw Error("amp.autocast",
                "a policy that is bound to the model whose parameters it keeps in fp32",
                "'" + policy.fp32_param_globs().front() + "' in a policy that is not bound",
                "Autocast region(policy.bind(model))");
  }
  if (policy.fp8_options().has_value() && !policy.is_bound()) {
    throw Error("amp.autocast", "a policy that is bound to the model whose products are in fp8",
                "one that is not bound", "Autocast region(policy.bind(model))");
  }
  warn_without_device(policy.device());
  guard_ = std::make_unique<Guard>(Region{policy.device(), policy.dtype(), policy.compiled()});
}

Autocast::Autocast(c10::DeviceType device, std::optional<c10::ScalarType> dtype, bool enabled) {
  // Where nothing is cast, the dtype does not matter: programs have one for fp32 too.
  const CastTarget target(device,
                          enabled && dtype.has_value() ? *dtype : default_16bit_dtype(device));
  if (enabled) warn_without_device(device);
  guard_ = std::make_unique<Guard>(
      Region{device, target.dtype, enabled ? CastPolicy::semitone(target).compiled() : nullptr});
}

Autocast::~Autocast() = default;

struct DisableCasts::Guard {
  RegionScope::Handle scope = RegionScope::begin_without_casts();
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
  at::autocast::clear_cache();
}

// The cache is not kept alive: it is destroyed with the outermost region, even if a graph that
// waits for its backward pass holds the state.
struct AutocastState::Data {
  Regions::List active;
  std::weak_ptr<CastCache> cache;  // expired: a new one for each scope
};

struct AutocastState::Scope::Guard {
  explicit Guard(const Data& data) : scope(RegionScope::begin(data.active, regions_of(data))) {}

  static ThreadStateGuard::Make regions_of(const Data& data) {
    auto regions = std::make_shared<Regions>();
    regions->innermost = data.active;
    regions->cache = data.cache.lock();
    if (regions->cache == nullptr) regions->cache = std::make_shared<CastCache>();
    return [regions = std::move(regions)](const c10::DebugInfoBase*) { return regions; };
  }

  RegionScope::Handle all_off = RegionScope::begin_without_casts();
  RegionScope::Handle scope;
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

AutocastState AutocastState::with_own_cache() const {
  auto data = std::make_shared<Data>();
  data->active = data_->active;
  return AutocastState(std::move(data));
}

bool AutocastState::has_region(c10::DeviceType device) const {
  return std::ranges::any_of(data_->active,
                             [&](const Region& region) { return region.device == device; });
}

AutocastState::Scope AutocastState::enter() const {
  return Scope(std::make_unique<Scope::Guard>(*data_));
}

}  // namespace semitone::amp
