#include "src/parallel/gpu_balance.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>

namespace semitone::parallel {
namespace {

constexpr double kLeastShare = 0.75;

// From the driver, which LibTorch has loaded if there is a GPU.
std::optional<GpuCapacity> capacity_of(c10::Device device) {
  constexpr int kMultiprocessorCount = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
  static void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return std::nullopt;
  const auto get = reinterpret_cast<int (*)(int*, int)>(::dlsym(driver, "cuDeviceGet"));
  const auto get_memory =
      reinterpret_cast<int (*)(std::size_t*, int)>(::dlsym(driver, "cuDeviceTotalMem_v2"));
  const auto get_attribute =
      reinterpret_cast<int (*)(int*, int, int)>(::dlsym(driver, "cuDeviceGetAttribute"));
  int handle = 0;
  GpuCapacity capacity;
  const bool known = get != nullptr && get_memory != nullptr && get_attribute != nullptr &&
                     get(&handle, device.index()) == 0 &&
                     get_memory(&capacity.memory, handle) == 0 &&
                     get_attribute(&capacity.multiprocessors, kMultiprocessorCount, handle) == 0;
  return known ? std::optional(capacity) : std::nullopt;
}

}  // namespace

std::string imbalance_of(const std::vector<c10::Device>& devices,
                         const std::vector<GpuCapacity>& capacities) {
  const auto compare = [&](const char* what, auto&& amount) -> std::string {
    const auto [least, most] = std::minmax_element(
        capacities.begin(), capacities.end(),
        [&](const GpuCapacity& a, const GpuCapacity& b) { return amount(a) < amount(b); });
    if (least == capacities.end() || amount(*least) >= kLeastShare * amount(*most)) return {};
    return fmt::format(
        "parallel.data_parallel: {} has less than {:.0f} % of the {} of {}, which will wait for "
        "it: "
        "leave it out of device_ids",
        devices[static_cast<std::size_t>(least - capacities.begin())].str(), 100 * kLeastShare,
        what, devices[static_cast<std::size_t>(most - capacities.begin())].str());
  };
  std::string memory =
      compare("memory", [](const GpuCapacity& one) { return static_cast<double>(one.memory); });
  if (!memory.empty()) return memory;
  return compare("multiprocessors",
                 [](const GpuCapacity& one) { return static_cast<double>(one.multiprocessors); });
}

std::string imbalance_of(const std::vector<c10::Device>& devices) {
  std::vector<GpuCapacity> capacities;
  for (const c10::Device device : devices) {
    const auto capacity = device.is_cuda() ? capacity_of(device) : std::nullopt;
    if (!capacity.has_value()) return {};
    capacities.push_back(*capacity);
  }
  return imbalance_of(devices, capacities);
}

}  // namespace semitone::parallel
