#include "semitone/core/device.h"

#include "src/core/cuda_driver.h"
#include "src/core/native_kernels.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>

namespace semitone {

c10::DeviceType default_device() {
  return at::hasCUDA() ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}

c10::ScalarType default_16bit_dtype(c10::DeviceType device) {
  return device == c10::DeviceType::CPU ? c10::ScalarType::BFloat16 : c10::ScalarType::Half;
}

std::string describe_16bit(c10::DeviceType device, c10::ScalarType dtype) {
  if (device == c10::DeviceType::CUDA) {
    if (const auto capability = compute_capability(0); capability.has_value()) {
      const bool is_fast = dtype == c10::ScalarType::BFloat16 ? computes_bf16_fast(*capability)
                                                              : computes_fp16_fast(*capability);
      return describe_speed(*capability, is_fast);
    }
  }
  return describe(native_kernels(device, dtype));
}

namespace {

// Why the CPU is used, if the machine or LibTorch is made for GPUs.
std::string describe_unused_gpus() {
  if (at::hasCUDA()) return "";
  const int count = gpu_count();
  if (at::globalContext().hasCUDART())
    return count == 0 ? "; no CUDA device" : "; LibTorch cannot use the CUDA device";
  return count == 0 ? "" : "; this LibTorch has no CUDA for the GPU here";
}

}  // namespace

std::string describe_device(c10::DeviceType device) {
  if (device != c10::DeviceType::CPU) return c10::DeviceTypeName(device);
  const std::string onednn =
      kIsX86 ? ", oneDNN up to " + std::string(name_of(effective_instruction_set())) : "";
  return "CPU, " + std::to_string(at::get_num_threads()) + " threads, " + at::get_cpu_capability() +
         onednn + "; bf16 " + describe_16bit(device, c10::ScalarType::BFloat16) + "; fp16 " +
         describe_16bit(device, c10::ScalarType::Half) + describe_unused_gpus();
}

}  // namespace semitone
