// A program that spawns processes of itself, for spawn_test.
//
//   spawn_program MODE FOLDER [ARGUMENT…]
//
// Every process appends a line to FOLDER/NAME: main (each process at its start), function.
#include "semitone/core/error.h"
#include "semitone/launch/spawn.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>

namespace launch = semitone::launch;

namespace {

volatile std::sig_atomic_t has_signal = 0;

void note(const std::string& file, const std::string& line) {
  std::ofstream(file, std::ios::app) << line + "\n" << std::flush;
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "-" : value;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) return 2;
  const std::string mode = argv[1];
  const std::string folder = argv[2];
  std::string arguments;
  for (int i = 3; i < argc; ++i) arguments += fmt::format("[{}]", argv[i]);
  note(folder + "/main", std::to_string(::getpid()));
  const auto function = [&](int local_rank) {
    note(folder + "/function", fmt::format("{} {} {} {}", local_rank, variable("RANK"),
                                           variable("WORLD_SIZE"), arguments));
    if (mode == "throw" && local_rank == 1) throw std::runtime_error("the function's");
    if (mode == "save") {
      std::signal(SIGTERM, [](int) { has_signal = 1; });
      note(folder + "/ready", std::to_string(::getpid()));
      while (has_signal == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      note(folder + "/saved", std::to_string(local_rank));
    }
    if (mode == "restart" && variable("TORCHELASTIC_RESTART_COUNT") == "0") std::_Exit(3);
  };
  const auto result =
      mode == "restart"
          ? launch::spawn(function, launch::this_program().nproc_per_node(1).max_restarts(1))
          : launch::spawn(function, mode == "none" ? 0 : 2);
  if (mode == "twice") launch::spawn(function, 2);
  if (!result.workers.empty()) {
    note(folder + "/result",
         fmt::format("{} workers, {} restarts, outcome {}", result.workers.size(), result.restarts,
                     static_cast<int>(result.outcome)));
  }
  return result.exit_code();
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 7;
}
