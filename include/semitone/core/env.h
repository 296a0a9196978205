#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace semitone::env {

/// An environment variable that Semitone reads. This list is the only place that names them.
struct Variable {
  const char* name;
  const char* meaning;
};

/// trace, debug, info, warning, error or off. Default: info.
inline constexpr Variable kLogLevel{
    "SEMITONE_LOG_LEVEL", "How much the library logs: trace, debug, info, warning, error, off"};
/// Default: data/mnist beside the sources that the program was built from.
inline constexpr Variable kDataDir{"SEMITONE_DATA_DIR", "Where the default data set lies"};
/// Default: tests/conformance/data.
inline constexpr Variable kConformanceDir{
    "SEMITONE_CONFORMANCE_DIR",
    "Where the conformance tests read their cases, instead of the repository's"};
/// Set by any program for libraries that follow the convention: plain output, see no-color.org.
inline constexpr Variable kNoColor{"NO_COLOR", "Set to anything: no colours on the terminal"};
/// Set by every terminal to its kind.
inline constexpr Variable kTerm{"TERM", "dumb: no colours and no moving line on the terminal"};

/// The number of this process among those that train together, as torchrun sets it.
inline constexpr Variable kRank{"RANK", "Number of this process among those that train together"};

/// Every variable above, for documentation and tests.
std::span<const Variable> all();

/// The value of a variable, nothing if it is unset or empty.
std::optional<std::string> get(const Variable& variable);

}  // namespace semitone::env
