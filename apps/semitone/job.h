#pragma once

#include "semitone/launch/launcher.h"

namespace semitone::cli {

// Runs a job to its end. This process's signals stop it; a failure is reported on standard error.
launch::LaunchResult run_job(const launch::LaunchOptions& options);

}  // namespace semitone::cli
