#pragma once

#include "src/report/report_json.h"

#include <string>

namespace semitone::report {

// The report for a terminal.
// @param other  the run to compare with; may be nullptr
std::string report_text(const ReportedRun& run, const ReportedRun* other);

}  // namespace semitone::report
