#pragma once

#include "src/amp/compiled_policy.h"

#include <ATen/core/dispatch/Dispatcher.h>

// Semitone's kernels on LibTorch's Autocast dispatch keys. One boxed kernel serves every operator:
// it reads the policy of the calling thread. Installed for an operator and a device type when the
// first policy needs it there, and never removed, so that the dispatch table does not change under
// running threads; where no region of ours is active it does what LibTorch's own kernel did. A
// boxed call costs about 0.1 us more than LibTorch's unboxed kernel (measured,
// benchmarks/autocast_bench).
namespace semitone::amp {

// The number of an operator in CompiledPolicy's tables.
OpId op_id(const c10::OperatorHandle& op);

// Makes the operator obey policies on this device type. Idempotent, thread-safe.
void install_kernel(const c10::OperatorHandle& op, c10::DeviceType device);

// The operators that LibTorch itself has a kernel for on the device type's Autocast key, as display
// names.
std::vector<std::string> stock_operators(c10::DeviceType device);

}  // namespace semitone::amp
