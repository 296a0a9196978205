#pragma once

#include "semitone/report/verdict.h"
#include "src/report/run_data.h"
#include "src/report/summary.h"

#include <vector>

namespace semitone::report {

// What all rules find, worst first; of equally bad ones, in the rules' order.
std::vector<Verdict> verdicts_of(const RunData& run, const Summary& summary);

}  // namespace semitone::report
