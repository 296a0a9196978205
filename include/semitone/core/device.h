#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

namespace semitone {

/// CUDA where LibTorch has it and a GPU is there, else the CPU.
c10::DeviceType default_device();

/// The 16-bit dtype that mixed precision uses on a device unless told otherwise: bf16 on a CPU (it
/// has fp32's range, so nothing needs scaling, and it is what CPUs speed up first), fp16 on every
/// other device.
c10::ScalarType default_16bit_dtype(c10::DeviceType device);

/// Whether the device has instructions for matrix products in this 16-bit dtype. On a CPU:
/// AVX512-BF16 or AMX for bf16, AVX512-FP16 or AMX-FP16 for fp16, as LibTorch's oneDNN reports it
/// (so ONEDNN_MAX_CPU_ISA counts). Where it is false, LibTorch's own kernels run 10 to 500 times
/// slower than fp32, and Semitone computes the same numbers through fp32: see amp/cast_policy.h,
/// Emulation. Always true for devices other than the CPU, and for fp32 and fp64.
bool has_fast_dtype(c10::DeviceType device, c10::ScalarType dtype);

/// One line about the machine for tables and logs: "CPU, 2 threads, AVX512; bf16 fast, fp16
/// emulated".
std::string describe_device(c10::DeviceType device);

}  // namespace semitone
