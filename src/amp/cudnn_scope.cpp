#include "src/amp/cudnn_scope.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace semitone::amp {
namespace {

constexpr auto kWorkspaceLimit = "CUDNN_CONV_WSCAP_DBG";

// LibTorch has one of these for the process, so there is one list of who wants what.
struct Scopes {
  std::mutex mutex;
  std::vector<const CudnnSettings*> alive;  // the youngest last
  // Before the first of them.
  bool benchmark = false;
  int benchmark_limit = 0;
  std::optional<std::string> workspace_limit;  // nothing: no such variable
};

Scopes& scopes() {
  static Scopes all;
  return all;
}

void remember(Scopes& all) {
  all.benchmark = at::globalContext().benchmarkCuDNN();
  all.benchmark_limit = at::globalContext().benchmarkLimitCuDNN();
  const char* const limit = std::getenv(kWorkspaceLimit);
  all.workspace_limit = limit == nullptr ? std::nullopt : std::optional<std::string>(limit);
}

void apply(const Scopes& all) {
  bool benchmark = all.benchmark;
  int benchmark_limit = all.benchmark_limit;
  std::optional<std::string> workspace_limit = all.workspace_limit;
  for (const CudnnSettings* settings : all.alive) {
    benchmark = settings->benchmark.value_or(benchmark);
    benchmark_limit = settings->benchmark_limit.value_or(benchmark_limit);
    if (settings->workspace_limit.has_value())
      workspace_limit = std::to_string(*settings->workspace_limit);
  }
  at::globalContext().setBenchmarkCuDNN(benchmark);
  at::globalContext().setBenchmarkLimitCuDNN(benchmark_limit);
  if (workspace_limit.has_value()) {
    ::setenv(kWorkspaceLimit, workspace_limit->c_str(), 1);
  } else {
    ::unsetenv(kWorkspaceLimit);
  }
}

}  // namespace

CudnnScope::CudnnScope(const CudnnSettings& settings) : settings_(settings) {
  Scopes& all = scopes();
  const std::scoped_lock lock(all.mutex);
  if (all.alive.empty()) remember(all);
  all.alive.push_back(&settings_);
  apply(all);
}

CudnnScope::~CudnnScope() {
  Scopes& all = scopes();
  const std::scoped_lock lock(all.mutex);
  std::erase(all.alive, &settings_);
  apply(all);
}

}  // namespace semitone::amp
