#pragma once

namespace semitone::cli {

// What the program returns. Every --help shows this list.
enum ExitCode {
  kSuccess = 0,
  kFailure = 1,   // a file is missing, damaged or cannot be written; a level's process was killed
  kUsage = 2,     // the command line makes no sense
  kDiverged = 3,  // training diverged
};

inline constexpr auto kExitCodesHelp =
    "Exit codes: 0 success, 1 failure (files, memory …), 2 wrong usage, 3 training diverged.";

}  // namespace semitone::cli
