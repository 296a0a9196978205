#include "semitone/launch/spawn.h"

#include "semitone/core/error.h"
#include "semitone/launch/launcher.h"
#include "src/core/env.h"
#include "src/core/parse_number.h"
#include "src/launch/signals_to.h"

#include <fmt/format.h>

#include <atomic>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

namespace semitone::launch {
namespace {

constexpr auto kSpawn = "launch.spawn";

// As comm::init decides whether a launcher with torchrun's variables started this process.
bool is_launched() {
  return env::get(env::kRank).has_value() || env::get(env::kWorldSize).has_value();
}

int local_rank() {
  for (const env::Variable& variable : {env::kLocalRank, env::kRank}) {
    const auto text = env::get(variable);
    if (!text.has_value()) continue;
    const auto rank = parse_number<int>(*text);
    if (rank.has_value() && *rank >= 0) return *rank;
    throw Error(kSpawn, fmt::format("a number from 0 in {}", variable.name),
                fmt::format("'{}'", *text));
  }
  return 0;
}

// The arguments of this process, without the program's name.
std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  if (arguments.empty())
    throw Error(kSpawn, "the arguments of this process in /proc/self/cmdline", "none");
  arguments.erase(arguments.begin());
  return arguments;
}

}  // namespace

LaunchOptions this_program() {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) throw Error(kSpawn, "the path of this program in /proc/self/exe", error.message());
  return LaunchOptions(program).arguments(own_arguments());
}

LaunchResult spawn(const std::function<void(int local_rank)>& function,
                   const LaunchOptions& options) {
  static std::atomic<bool> was_called = false;
  if (was_called.exchange(true)) {
    throw Error(kSpawn, "one call of spawn in a program", "another",
                "return from main() after the first one, or do both in one function");
  }
  if (!is_launched()) {
    Launcher launcher(options);
    const SignalsTo signals(launcher);
    return launcher.run();
  }
  function(local_rank());
  return {};
}

LaunchResult spawn(const std::function<void(int local_rank)>& function, int nproc) {
  return spawn(function, this_program().nproc_per_node(nproc));
}

}  // namespace semitone::launch
