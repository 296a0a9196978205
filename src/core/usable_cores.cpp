#include "src/core/usable_cores.h"

#include "src/core/file.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

namespace semitone {
namespace {

// The path in the line "0::/user.slice/job" of /proc/self/cgroup, without its first slash.
std::filesystem::path group_of(const std::string& lines) {
  constexpr std::string_view kSecondVersion = "0::/";
  std::istringstream stream(lines);
  for (std::string line; std::getline(stream, line);) {
    if (line.starts_with(kSecondVersion)) return line.substr(kSecondVersion.size());
  }
  return {};
}

}  // namespace

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  // The machine has more cores than the set can represent.
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  return cores > 0 ? cores : 1;
}

int physical_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return usable_cores();
  std::set<std::string> cores;
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &set)) continue;
    // "0,64": the threads of this core.
    std::string threads = read_text("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                                    "/topology/thread_siblings_list");
    cores.insert(threads.empty() ? std::to_string(cpu) : std::move(threads));
  }
  return std::max(1, static_cast<int>(cores.size()));
}

int all_cores() {
  return std::max(usable_cores(), static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
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

int granted_cores() {
  const std::optional<double> quota = cpu_quota();
  const int cores = usable_cores();
  return quota.has_value() && *quota < cores ? static_cast<int>(std::ceil(*quota)) : cores;
}

std::optional<double> parse_cpu_quota(std::string_view text) {
  std::istringstream stream{std::string(text)};
  double quota = 0;
  double period = 0;
  if (!(stream >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

}  // namespace semitone
