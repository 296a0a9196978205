#pragma once

#include "semitone/amp/opt_level.h"

#include <optional>
#include <string>

namespace semitone::amp {

// LibTorch's settings of cuDNN while this lives.
class CudnnScope {
 public:
  explicit CudnnScope(const CudnnSettings& settings);
  ~CudnnScope();
  CudnnScope(const CudnnScope&) = delete;
  CudnnScope& operator=(const CudnnScope&) = delete;

 private:
  std::optional<bool> benchmark_before_;
  std::optional<int> benchmark_limit_before_;
  // Of the environment; the inner one is nothing where there was no such variable.
  std::optional<std::optional<std::string>> workspace_limit_before_;
};

}  // namespace semitone::amp
