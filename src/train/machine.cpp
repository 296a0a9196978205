#include "src/train/machine.h"

#include "src/core/cuda_driver.h"
#include "src/core/file.h"
#include "src/core/usable_cores.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <cstdlib>
#include <sstream>

namespace semitone::train {
namespace {

// The text after a name in lines of the form "name : text".
std::string value_of(const std::string& lines, std::string_view name) {
  std::istringstream stream(lines);
  for (std::string line; std::getline(stream, line);) {
    if (!line.starts_with(name)) continue;
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;
    const auto begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return {};
}

// "16331752 kB"
std::int64_t bytes_of(const std::string& kilobytes) {
  return std::strtoll(kilobytes.c_str(), nullptr, 10) * 1024;
}

}  // namespace

Machine read_machine() {
  Machine machine;
  machine.processor = value_of(read_text("/proc/cpuinfo"), "model name");
  machine.cores = usable_cores();
  machine.physical_cores = physical_cores();
  machine.all_cores = all_cores();
  machine.cpu_quota = cpu_quota();
  machine.threads = at::get_num_threads();
  std::istringstream(read_text("/proc/loadavg")) >> machine.load;
  machine.best_set = effective_instruction_set(read_cpu_features(), "");
  machine.set = effective_instruction_set();
  machine.capability = at::get_cpu_capability();
  const std::string memory = read_text("/proc/meminfo");
  machine.memory = bytes_of(value_of(memory, "MemTotal"));
  machine.available_memory = bytes_of(value_of(memory, "MemAvailable"));
  machine.gpus = gpu_count();
  machine.libtorch_has_gpu = at::hasCUDA();
  return machine;
}

}  // namespace semitone::train
