#include "src/amp/cudnn_scope.h"

#include <ATen/Context.h>

#include <cstdlib>

namespace semitone::amp {
namespace {

constexpr auto kWorkspaceLimit = "CUDNN_CONV_WSCAP_DBG";

std::optional<std::string> workspace_limit() {
  const char* const value = std::getenv(kWorkspaceLimit);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace

CudnnScope::CudnnScope(const CudnnSettings& settings) {
  at::Context& context = at::globalContext();
  if (settings.benchmark.has_value()) {
    benchmark_before_ = context.benchmarkCuDNN();
    context.setBenchmarkCuDNN(*settings.benchmark);
  }
  if (settings.benchmark_limit.has_value()) {
    benchmark_limit_before_ = context.benchmarkLimitCuDNN();
    context.setBenchmarkLimitCuDNN(*settings.benchmark_limit);
  }
  if (settings.workspace_limit.has_value()) {
    workspace_limit_before_ = workspace_limit();
    ::setenv(kWorkspaceLimit, std::to_string(*settings.workspace_limit).c_str(), 1);
  }
}

CudnnScope::~CudnnScope() {
  at::Context& context = at::globalContext();
  if (benchmark_before_.has_value()) context.setBenchmarkCuDNN(*benchmark_before_);
  if (benchmark_limit_before_.has_value()) context.setBenchmarkLimitCuDNN(*benchmark_limit_before_);
  if (!workspace_limit_before_.has_value()) return;
  if (workspace_limit_before_->has_value()) {
    ::setenv(kWorkspaceLimit, (*workspace_limit_before_)->c_str(), 1);
  } else {
    ::unsetenv(kWorkspaceLimit);
  }
}

}  // namespace semitone::amp
