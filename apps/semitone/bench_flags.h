#pragma once

#include "src/train/workload.h"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <memory>
#include <string>

namespace semitone::cli {

// The component in errors.
inline constexpr auto kBench = "cli.bench";

// Largest number that flags accept, unless they have another limit.
inline constexpr std::int64_t kBenchMost = 1'000'000;

// The command line of `semitone bench`, checked.
struct BenchFlags {
  std::string workload;
  std::string opt_level = "O1";
  std::string dtype = "auto";
  std::string policy = "semitone";
  std::string memory_format = "auto";
  std::string device = "auto";
  std::string optimizer = "fused";
  std::int64_t batch_size = 0;  // 0: the workload's
  std::int64_t image_size;
  std::int64_t length = 0;  // these, too
  std::int64_t layers = 0;
  std::int64_t width = 0;
  std::int64_t heads = 0;
  std::int64_t vocabulary = 0;
  double dropout;
  bool checkpoint_activations = false;
  std::int64_t check_steps;
  std::int64_t warm_up;
  std::int64_t rounds = 10;
  std::int64_t seed = 0;
  std::int64_t threads = 0;  // 0: as many as LibTorch takes
  bool steps_from_stdin = false;
  bool floor = false;
  std::string without_kernels;
  std::string json;
};

// Adds the flags to the command. The result holds their values once the command line is parsed.
std::shared_ptr<const BenchFlags> add_bench_flags(CLI::App& command);

// UsageError for flags that contradict each other or the workload.
void check(const BenchFlags& flags, const CLI::App& command);

// The library's options for the flags.
train::WorkloadOptions options_of(const BenchFlags& flags);

}  // namespace semitone::cli
