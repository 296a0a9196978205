#pragma once

#include "src/report/run_data.h"
#include "src/report/samples_file.h"

#include <filesystem>
#include <vector>

namespace semitone::report {

// Adds the losses in metrics.csv, and its loss scales if samples.jsonl had none; nothing if there
// is no such file.
void read_metrics(const std::filesystem::path& path, const std::vector<Restart>& restarts,
                  RunData& run);

}  // namespace semitone::report
