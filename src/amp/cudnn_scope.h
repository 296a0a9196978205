#pragma once

#include "semitone/amp/opt_level.h"

namespace semitone::amp {

// LibTorch's settings of cuDNN while this lives. Of several at a time the youngest counts, setting by
// setting; without any, what was before the first. The limit of workspace alone stays.
class CudnnScope {
 public:
  explicit CudnnScope(const CudnnSettings& settings);
  ~CudnnScope();
  CudnnScope(const CudnnScope&) = delete;
  CudnnScope& operator=(const CudnnScope&) = delete;
};

}  // namespace semitone::amp
