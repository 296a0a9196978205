#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

namespace semitone {

/// Returns CUDA if LibTorch supports it and a GPU is present, otherwise the CPU.
c10::DeviceType default_device();

/// Returns the 16-bit dtype that mixed precision uses on a device by default. On a CPU it is bf16:
/// gradients need no scaling, since bf16 has fp32's range, and more CPUs have instructions for bf16
/// than for fp16. On every other device it is fp16.
c10::ScalarType default_16bit_dtype(c10::DeviceType device);

/// Describes for which kinds of operators LibTorch has kernels in this 16-bit dtype, forward and
/// backward, that are about as fast as fp32's. Semitone emulates the others (amp::Emulation). The
/// text is "native", "emulated", or "products native, convolutions emulated, LSTM emulated,
/// attention emulated". Kinds of convolutions are listed separately where they differ. For a GPU
/// the text is "native", or says that the dtype is slower than fp32 at this compute capability:
/// fp16 on GeForce 10 (6.1) and before 5.3, bf16 before 8.0.
std::string describe_16bit(c10::DeviceType device, c10::ScalarType dtype);

/// Describes the CPU in one line, for tables and logs: "CPU, 2 threads, AVX512, oneDNN up to
/// AVX512-BF16; bf16 native; fp16 emulated". It also says so if there is a GPU that LibTorch cannot
/// use, or if LibTorch has CUDA but there is no GPU: "; no CUDA device". For any other device it
/// returns the device's name, "CUDA".
std::string describe_device(c10::DeviceType device);

}  // namespace semitone
