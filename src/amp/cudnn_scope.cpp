#include "src/amp/cudnn_scope.h"

#include <ATen/Context.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

constexpr auto kWorkspaceLimit = "CUDNN_CONV_WSCAP_DBG";

// One process-wide setting. The most recent request wins; without requests, the original value
// returns.
template <typename Value>
class Setting {
 public:
  Setting(Value (*read)(), void (*write)(const Value&)) : read_(read), write_(write) {}

  void add(const CudnnScope* scope, const std::optional<Value>& wanted) {
    if (!wanted.has_value()) return;
    if (wanted_.empty()) before_ = read_();
    wanted_.emplace_back(scope, *wanted);
    write_(wanted_.back().second);
  }

  void remove(const CudnnScope* scope) {
    if (std::erase_if(wanted_, [&](const auto& one) { return one.first == scope; }) == 0) return;
    write_(wanted_.empty() ? before_ : wanted_.back().second);
  }

 private:
  Value (*read_)();
  void (*write_)(const Value&);
  Value before_{};
  std::vector<std::pair<const CudnnScope*, Value>> wanted_;  // the youngest last
};

// Written only if it differs, and not restored: other threads may read the environment meanwhile,
// which the C library does not guard, and cuDNN reads this variable once, so it would not notice.
void set_workspace_limit(std::int64_t mebibytes) {
  const std::string wanted = std::to_string(mebibytes);
  const char* const current = std::getenv(kWorkspaceLimit);
  if (current == nullptr || current != wanted) ::setenv(kWorkspaceLimit, wanted.c_str(), 1);
}

// LibTorch has one of each per process.
struct Settings {
  std::mutex mutex;
  Setting<bool> benchmark{[] { return at::globalContext().benchmarkCuDNN(); },
                          [](const bool& value) { at::globalContext().setBenchmarkCuDNN(value); }};
  Setting<int> benchmark_limit{
      [] { return at::globalContext().benchmarkLimitCuDNN(); },
      [](const int& value) { at::globalContext().setBenchmarkLimitCuDNN(value); }};
};

// Never destroyed: a MixedPrecision in static storage may be destroyed later.
Settings& settings_of_process() {
  static Settings& all = *new Settings;  // NOLINT(cppcoreguidelines-owning-memory)
  return all;
}

}  // namespace

CudnnScope::CudnnScope(const detail::CudnnSettings& settings) {
  Settings& all = settings_of_process();
  const std::scoped_lock lock(all.mutex);
  all.benchmark.add(this, settings.benchmark);
  all.benchmark_limit.add(this, settings.benchmark_limit);
  if (settings.workspace_limit.has_value()) set_workspace_limit(*settings.workspace_limit);
}

CudnnScope::~CudnnScope() {
  Settings& all = settings_of_process();
  const std::scoped_lock lock(all.mutex);
  all.benchmark.remove(this);
  all.benchmark_limit.remove(this);
}

}  // namespace semitone::amp
