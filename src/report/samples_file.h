#pragma once

#include "src/report/run_data.h"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

namespace semitone::report {

// The run went on from this step: what earlier lines say of it and of later steps is void.
struct Restart {
  std::int64_t step = 0;
  double wall_time = 0;
  std::optional<std::int64_t> metrics_bytes;  // the size of metrics.csv then; none in old records
};

// Adds the content of samples.jsonl; nothing if there is no such file.
std::vector<Restart> read_samples(const std::filesystem::path& path, RunData& run);

}  // namespace semitone::report
