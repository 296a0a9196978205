#pragma once

#include "semitone/report/precision_report.h"
#include "semitone/report/verdict.h"
#include "tests/report/made_up_run.h"

#include <string>
#include <vector>

namespace semitone::report::made_up {

// The verdict of a rule. One that does not apply has severity good and no title.
inline Verdict verdict_of(const MadeUpRun& run, const std::string& id) {
  const PrecisionReport report(run.path());
  for (const Verdict& verdict : report.verdicts()) {
    if (verdict.id == id) return verdict;
  }
  return {};
}

inline bool has(const MadeUpRun& run, const std::string& id) {
  return !verdict_of(run, id).title.empty();
}

// A run of one sample with these operators.
inline void add_operators(MadeUpRun& run, const std::vector<Json>& operators) {
  Json one = sample(1, 1, {});
  one["operators"] = operators;
  run.add({one});
}

}  // namespace semitone::report::made_up
