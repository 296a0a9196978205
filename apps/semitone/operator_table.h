#pragma once

#include "src/train/operator_speed.h"

#include <nlohmann/json_fwd.hpp>

#include <iosfwd>
#include <vector>

// The output of `semitone ops --speed`, and a part of that of `semitone doctor`.
namespace semitone::cli {

void print(std::ostream& out, const std::vector<train::OperatorSpeed>& speeds);
nlohmann::ordered_json to_json(const std::vector<train::OperatorSpeed>& speeds);

}  // namespace semitone::cli
