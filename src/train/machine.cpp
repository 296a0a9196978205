#include "src/train/machine.h"

#include "src/core/cuda_driver.h"
#include "src/core/file.h"
#include "src/core/usable_cores.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
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

// The path in the line "0::/user.slice/job" of /proc/self/cgroup, without its first slash.
std::filesystem::path group_of(const std::string& lines) {
  constexpr std::string_view kSecondVersion = "0::/";
  std::istringstream stream(lines);
  for (std::string line; std::getline(stream, line);) {
    if (line.starts_with(kSecondVersion)) return line.substr(kSecondVersion.size());
  }
  return {};
}

// The smallest limit of the process's control group and of those that contain it.
std::optional<double> cpu_quota() {
  const std::filesystem::path root = "/sys/fs/cgroup";
  std::filesystem::path group = group_of(read_text("/proc/self/cgroup"));
  std::optional<double> least;
  const auto take = [&](const std::optional<double>& quota) {
    if (quota.has_value() && (!least.has_value() || *quota < *least)) least = quota;
  };
  for (;; group = group.parent_path()) {
    take(parse_cpu_quota(read_text(root / group / "cpu.max")));
    if (group.empty()) break;
  }
  // The first version of control groups: -1 is no limit.
  take(parse_cpu_quota(read_text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") + " " +
                       read_text("/sys/fs/cgroup/cpu/cpu.cfs_period_us")));
  return least;
}

}  // namespace

std::optional<double> parse_cpu_quota(std::string_view text) {
  std::istringstream stream{std::string(text)};
  double quota = 0;
  double period = 0;
  if (!(stream >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

Machine read_machine() {
  Machine machine;
  machine.processor = value_of(read_text("/proc/cpuinfo"), "model name");
  machine.cores = usable_cores();
  machine.all_cores = std::max(machine.cores, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
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
