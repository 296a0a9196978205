#include "src/comm/gpu.h"

#include "semitone/core/error.h"
#include "src/comm/network.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <fmt/format.h>

#include <cstddef>
#include <map>
#include <string>

namespace semitone::comm {

int gpu_index(int local_rank, int local_world_size, int gpus) {
  // A launcher may show each process its own GPU only: srun --gpus-per-task 1.
  if (gpus == 1) return 0;
  if (gpus < local_world_size) {
    throw Error(kInitComponent,
                fmt::format("a GPU for each of the {} ranks of this machine", local_world_size),
                std::to_string(gpus), "start fewer, or choose backend(\"gloo\") and the CPU");
  }
  return local_rank % gpus;
}

void require_distinct_gpus(const std::vector<std::string>& identities) {
  std::map<std::string, std::size_t> owners;
  for (std::size_t rank = 0; rank < identities.size(); ++rank) {
    const auto [owner, added] = owners.try_emplace(identities[rank], rank);
    if (added) continue;
    throw Error(
        kInitComponent, "a GPU of its own for each rank",
        fmt::format("the same one, {}, for ranks {} and {}", identities[rank], owner->second, rank),
        "start as many processes on a machine as it has GPUs, each with a LOCAL_RANK of its "
        "own or one GPU visible; or choose backend(\"gloo\") and the CPU");
  }
}

c10::Device select_gpu(const Rendezvous& rendezvous) {
  const c10::impl::VirtualGuardImpl gpus(c10::DeviceType::CUDA);
  const int number = gpu_index(rendezvous.local_rank.value_or(0),
                               rendezvous.local_world_size.value_or(1), gpus.deviceCount());
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(number));
  gpus.setDevice(device);
  return device;
}

}  // namespace semitone::comm
