#include "src/train/device.h"

#include "semitone/core/device.h"
#include "semitone/core/error.h"
#include "src/core/counted.h"
#include "src/core/cuda_driver.h"
#include "src/core/parse_number.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <optional>

namespace semitone::train {
namespace {

constexpr std::string_view kGpu = "cuda:";

std::optional<c10::DeviceIndex> index_of(std::string_view name) {
  if (!name.starts_with(kGpu)) return std::nullopt;
  const auto index = parse_number<c10::DeviceIndex>(name.substr(kGpu.size()));
  return index.has_value() && *index >= 0 ? index : std::nullopt;
}

}  // namespace

bool is_device_name(std::string_view name) {
  return name == "auto" || name == "cpu" || name == "cuda" || names_one_gpu(name);
}

bool names_one_gpu(std::string_view name) {
  return index_of(name).has_value();
}

c10::Device find_device(std::string_view name) {
  if (name == "cpu") return c10::kCPU;
  if (name == "auto") return default_device();
  const std::string expected = "a GPU for --device " + std::string(name);
  if (!at::globalContext().hasCUDART()) {
    throw Error("train.device", expected, "a LibTorch without CUDA",
                "build with PRESET=cuda (docs/gpu.md), or --device cpu");
  }
  if (!at::hasCUDA()) {
    throw Error("train.device", expected,
                gpu_count() == 0 ? "no CUDA device"
                                 : counted(gpu_count(), "GPU") + " that LibTorch cannot use",
                "check the driver with nvidia-smi, or --device cpu");
  }
  const std::optional<c10::DeviceIndex> index = index_of(name);
  if (!index.has_value()) return c10::kCUDA;
  const c10::DeviceIndex count = at::detail::getCUDAHooks().deviceCount();
  if (*index >= count)
    throw Error("train.device", expected, counted(count, "GPU") + ", numbered from 0",
                "--device cuda:0");
  return {c10::kCUDA, *index};
}

}  // namespace semitone::train
