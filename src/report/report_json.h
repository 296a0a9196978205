#pragma once

#include "semitone/report/verdict.h"
#include "src/report/run_data.h"
#include "src/report/summary.h"

#include <nlohmann/json_fwd.hpp>

#include <vector>

namespace semitone::report {

// A run with what was computed from its record.
struct ReportedRun {
  RunData run;
  Summary summary;
  std::vector<Verdict> verdicts;
};

// The object of a report, which docs/report.md describes.
// @param other  the run to compare with; may be nullptr
nlohmann::ordered_json report_json(const ReportedRun& run, const ReportedRun* other);

}  // namespace semitone::report
