#include "src/comm/machine.h"

#include "src/core/host_name.h"

#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

namespace semitone::comm {
namespace {

// A name that is unique to this process, for kernels without one, as in some sandboxes.
constexpr auto kUnknown = "-";

std::string kernel() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id.empty() ? kUnknown : id;
}

std::string network() {
  std::error_code error;
  const auto name = std::filesystem::read_symlink("/proc/self/ns/net", error);
  return error ? kUnknown : name.string();
}

}  // namespace

Machine this_machine() {
  return {host_name(), kernel(), network()};
}

std::string to_string(const Machine& machine) {
  return machine.host + " " + machine.kernel + " " + machine.network;
}

Machine parse_machine(const std::string& text) {
  Machine machine;
  std::istringstream(text) >> machine.host >> machine.kernel >> machine.network;
  return machine;
}

bool are_same_machine(const Machine& one, const Machine& other) {
  return one.host == other.host && one.kernel == other.kernel;
}

bool share_loopback(const Machine& one, const Machine& other) {
  if (one.kernel == kUnknown || one.network == kUnknown) return are_same_machine(one, other);
  return one.kernel == other.kernel && one.network == other.network;
}

}  // namespace semitone::comm
