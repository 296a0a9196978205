#pragma once

#include "semitone/amp/opt_level.h"

namespace semitone::amp {

// Applies settings to LibTorch's cuDNN while this object exists. With several objects the most
// recent one wins, setting by setting. Destroying the last restores the original values, except the
// workspace limit, which stays.
class CudnnScope {
 public:
  explicit CudnnScope(const detail::CudnnSettings& settings);
  ~CudnnScope();
  CudnnScope(const CudnnScope&) = delete;
  CudnnScope& operator=(const CudnnScope&) = delete;
};

}  // namespace semitone::amp
