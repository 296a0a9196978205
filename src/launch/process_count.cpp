#include "src/launch/process_count.h"

#include "semitone/core/error.h"
#include "src/core/cuda_driver.h"
#include "src/core/parse_number.h"
#include "src/core/usable_cores.h"
#include "src/launch/limits.h"

#include <fmt/format.h>

namespace semitone::launch {
namespace {

constexpr auto kProcessCount = "launch.options";

void require(bool right, std::string_view expected, std::string_view got) {
  if (!right) throw Error(kProcessCount, expected, got);
}

}  // namespace

ProcessCount ProcessCount::parse(std::string_view text) {
  if (const auto value = parse_number<int>(text); value.has_value()) {
    require(*value >= 1 && *value <= kMaxProcesses,
            fmt::format("nproc-per-node from 1 to {}", kMaxProcesses), fmt::format("'{}'", text));
    return {*value, ""};
  }
  require(text == "auto" || text == "cpu" || text == "gpu",
          "nproc-per-node to be a number, auto, cpu or gpu", fmt::format("'{}'", text));
  const int gpus = text == "cpu" ? 0 : gpu_count();
  require(text != "gpu" || gpus > 0, "a GPU for nproc-per-node gpu", "none");
  if (gpus > 0) return {gpus, fmt::format("one for each of {} GPUs", gpus)};
  const int cores = granted_cores();
  return {cores, fmt::format("one for each of {} cores", cores)};
}

}  // namespace semitone::launch
