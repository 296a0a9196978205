#pragma once

/// What a training reports: records of runs, for spreadsheets and TensorBoard.

#include "semitone/core/error.h"
#include "semitone/report/run_log.h"
#include "semitone/report/run_log_options.h"
