#include "semitone/core/device.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace semitone {
namespace {

// LibTorch asks oneDNN what the processor can do and shows the answer as an operator without
// arguments.
bool ask_onednn(const char* operator_name) {
  const auto op = c10::Dispatcher::singleton().findSchema({operator_name, ""});
  if (!op.has_value()) return false;  // a LibTorch without oneDNN
  torch::jit::Stack stack;
  op->callBoxed(stack);
  return stack.at(0).toBool();
}

// oneDNN says yes to bf16 on every AVX-512 processor, but those before Cooper Lake and Zen 4
// convert to fp32 and back in registers: matmul 512^3 then runs at 45 GF/s against 124 in fp32
// (measured with ONEDNN_MAX_CPU_ISA=AVX512_CORE).
bool avx512_without_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && !__builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace

c10::DeviceType default_device() {
  return at::hasCUDA() ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}

c10::ScalarType default_16bit_dtype(c10::DeviceType device) {
  return device == c10::DeviceType::CPU ? c10::ScalarType::BFloat16 : c10::ScalarType::Half;
}

bool has_fast_dtype(c10::DeviceType device, c10::ScalarType dtype) {
  if (device != c10::DeviceType::CPU) return true;
  if (dtype == c10::ScalarType::BFloat16) {
    static const bool supported =
        ask_onednn("mkldnn::_is_mkldnn_bf16_supported") && !avx512_without_bf16();
    return supported;
  }
  if (dtype == c10::ScalarType::Half) {
    static const bool supported = ask_onednn("mkldnn::_is_mkldnn_fp16_supported");
    return supported;
  }
  return true;
}

std::string describe_device(c10::DeviceType device) {
  if (device != c10::DeviceType::CPU) return c10::DeviceTypeName(device);
  const auto speed = [](c10::ScalarType dtype) {
    return has_fast_dtype(c10::DeviceType::CPU, dtype) ? "fast" : "emulated";
  };
  return "CPU, " + std::to_string(at::get_num_threads()) + " threads, " + at::get_cpu_capability() +
         "; bf16 " + speed(c10::ScalarType::BFloat16) + ", fp16 " + speed(c10::ScalarType::Half);
}

}  // namespace semitone
