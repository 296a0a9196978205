#include "src/core/cuda_driver.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace semitone {
namespace {

// From cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
constexpr int kMajor = 75;
constexpr int kMinor = 76;

struct Driver {
  int (*get_count)(int*) = nullptr;
  int (*get_attribute)(int*, int, int) = nullptr;
};

const Driver& driver() {
  static const Driver found = [] {
    Driver result;
    // Never unloaded, since a driver may have threads.
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return result;
    const auto init = reinterpret_cast<int (*)(unsigned)>(::dlsym(library, "cuInit"));
    if (init == nullptr || init(0) != 0) return result;
    result.get_count = reinterpret_cast<int (*)(int*)>(::dlsym(library, "cuDeviceGetCount"));
    result.get_attribute =
        reinterpret_cast<int (*)(int*, int, int)>(::dlsym(library, "cuDeviceGetAttribute"));
    return result;
  }();
  return found;
}

}  // namespace

int gpu_count() {
  int count = 0;
  return driver().get_count != nullptr && driver().get_count(&count) == 0 ? count : 0;
}

std::optional<ComputeCapability> compute_capability(int gpu) {
  ComputeCapability result;
  const auto get = driver().get_attribute;
  if (get == nullptr || gpu < 0 || gpu >= gpu_count() || get(&result.major, kMajor, gpu) != 0 ||
      get(&result.minor, kMinor, gpu) != 0)
    return std::nullopt;
  return result;
}

bool computes_fp16_fast(ComputeCapability capability) {
  return capability >= ComputeCapability{5, 3} && capability != ComputeCapability{6, 1};
}

bool computes_bf16_fast(ComputeCapability capability) {
  return capability >= ComputeCapability{8, 0};
}

std::string describe_speed(ComputeCapability capability, bool is_fast) {
  if (is_fast) return "native";
  return fmt::format("slower than float32 on this GPU (compute capability {}.{})", capability.major,
                     capability.minor);
}

}  // namespace semitone
