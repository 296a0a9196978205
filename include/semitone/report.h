#pragma once

/// What a training reports: records of runs, for spreadsheets and TensorBoard; samples of its values,
/// operators and times, and a report on what number formats did to a run; the operator that made the
/// first inf or NaN; and what reduced precision would do to each operator.

#include "semitone/core/error.h"
#include "semitone/report/nonfinite_check.h"
#include "semitone/report/nonfinite_finding.h"
#include "semitone/report/precision_report.h"
#include "semitone/report/recorder.h"
#include "semitone/report/run_log.h"
#include "semitone/report/run_log_options.h"
#include "semitone/report/verdict.h"
#include "semitone/report/what_if.h"
