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

// The table at the end of `semitone train`.
void print_table(std::ostream& out, const std::vector<train::TrainResult>& results);

}  // namespace semitone::cli
