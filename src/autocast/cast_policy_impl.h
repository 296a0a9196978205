#pragma once

#include "semitone/autocast/cast_policy.h"
#include "src/autocast/compiled_policy.h"

#include <memory>
#include <mutex>
#include <string>

namespace semitone::amp {

struct CastPolicy::NamedParameter {
  std::string name;
  BoundParameter parameter;
};

// A preset's rows for one device.
struct CastPolicy::Preset {
  Rows rows;
  bool as_libtorch;  // of preset torch: raises where LibTorch raises

  // The actions by OpId, compiled at the first call, which installs the operators' kernels on a
  // device. Always called with the same device.
  const CompiledPolicy::Actions& actions(c10::DeviceType device) const;

  mutable std::once_flag once;
  mutable CompiledPolicy::Actions by_id;
};

struct CastPolicy::Compiled {
  std::once_flag once;
  std::shared_ptr<const CompiledPolicy> policy;
  std::once_flag rows_once;
  Rows rows;  // the preset's with the edits
};

}  // namespace semitone::amp
