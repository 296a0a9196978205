#pragma once

#include "semitone/train/trainer.h"

#include <iosfwd>
#include <string>
#include <vector>

namespace semitone::cli {

double megabytes(std::int64_t bytes);

// An array with one object a level.
std::string to_json(const std::vector<train::TrainResult>& results);
// What to_json wrote. Error for anything else.
std::vector<train::TrainResult> from_json(const std::string& text);

// The table at the end of `semitone train`, with the columns that a terminal of this width has room
// for; 0: with all. Speeds are of the median step.
void print_table(std::ostream& out, const std::vector<train::TrainResult>& results, int terminal);

}  // namespace semitone::cli
