#pragma once

#include "src/train/trainer.h"

#include <iosfwd>
#include <string>
#include <vector>

namespace semitone::cli {

double megabytes(std::int64_t bytes);

// An array with one object per level.
std::string to_json(const std::vector<train::TrainResult>& results);
// Parses the output of to_json. Error for anything else.
std::vector<train::TrainResult> from_json(const std::string& text);

// The table at the end of `semitone train`, with the columns that fit a terminal of this width; 0:
// with all. Speeds are those of the median step.
void print_table(std::ostream& out, const std::vector<train::TrainResult>& results, int terminal);

}  // namespace semitone::cli
