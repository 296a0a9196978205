#pragma once

#include "src/amp/compiled_policy.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

// Semitone's kernels on LibTorch's Autocast dispatch keys. One boxed kernel serves every operator:
// it reads the policy of the calling thread, and where no region of ours is active it does what
// LibTorch's own kernel did.
//
// Kernels are installed when the first policy for a device type is used, and never removed. All
// places that hold a kernel of LibTorch are taken at once, then: the dispatch table has no lock for
// its readers, and a thread that reads an entry while it changes could take half of each. Operators
// without a kernel can be added at any time, since nobody reads the entry of an operator whose key
// falls through.
//
// A boxed call costs about 0.1 us more than LibTorch's unboxed kernel (measured,
// benchmarks/autocast_bench).
namespace semitone::amp {

// The number of an operator in CompiledPolicy's tables.
OpId op_id(const c10::OperatorHandle& op);

// Makes every operator that LibTorch casts by itself on this device type obey policies. Idempotent,
// thread-safe; so is the next.
void install_stock_kernels(c10::DeviceType device);

// Makes one more operator obey policies on this device type.
void install_kernel(const c10::OperatorHandle& op, c10::DeviceType device);

// The operators that a policy with lowers_mixed() has something to do for.
void install_mixed_kernels(c10::DeviceType device);

// The ATen operators that LibTorch itself has a kernel for on the device type's Autocast key, as
// display names.
const std::vector<std::string>& stock_operators(c10::DeviceType device);

}  // namespace semitone::amp
