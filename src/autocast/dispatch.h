#pragma once

#include "src/autocast/compiled_policy.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

// Semitone's kernels on LibTorch's Autocast dispatch keys. One boxed kernel serves every operator.
// It reads the policy of the calling thread. Outside of Semitone's regions it behaves as LibTorch's
// own kernel did.
//
// Kernels are installed when the first policy for a device type is used, and never removed. At that
// moment all entries with a kernel of LibTorch are replaced at once. The dispatch table has no lock
// for its readers, so a thread that read an entry during a change could get half of each. Operators
// without a kernel can be added at any time, since the entry of an operator whose key falls through
// is not read.
//
// A boxed call costs about 0.1 us more than LibTorch's unboxed kernel (measured,
// benchmarks/autocast_bench).
namespace semitone::amp {

// The index of an operator in CompiledPolicy's tables.
OpId op_id(const c10::OperatorHandle& op);

// Makes every operator that LibTorch casts on this device type follow policies. Idempotent and
// thread-safe; so is the next function.
void install_stock_kernels(c10::DeviceType device);

// Makes one more operator follow policies on this device type.
void install_kernel(const c10::OperatorHandle& op, c10::DeviceType device);

// The operators for which a policy with lowers_mixed() has work.
void install_mixed_kernels(c10::DeviceType device);

// The display names of the ATen operators for which LibTorch itself has a kernel on the device
// type's Autocast key; CUDA's for a device type of another library that has none there.
const std::vector<std::string>& stock_operators(c10::DeviceType device);

}  // namespace semitone::amp
