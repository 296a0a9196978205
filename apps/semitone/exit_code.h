#pragma once

namespace semitone::cli {

// The program's exit codes. Every --help shows this list.
enum ExitCode {
  kSuccess = 0,
  kFailure = 1,   // a file is missing, damaged or cannot be written; a level's process was killed
  kUsage = 2,     // the command line makes no sense
  kDiverged = 3,  // training diverged
  kSignal = 128,  // and above it the number of the signal that ended it
};

inline constexpr auto kExitCodesHelp =
    "Exit codes: 0 success, 1 failure (files, memory …), 2 wrong usage, 3 training diverged, 128 + "
    "N "
    "ended by signal N.";

}  // namespace semitone::cli
