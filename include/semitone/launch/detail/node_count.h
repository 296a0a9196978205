#pragma once

#include <string_view>

namespace semitone::launch::detail {

/// The number of machines ("nodes") of a job, as a range.
struct NodeCount {
  int min = 1;
  int max = 1;

  /// Parses "2" or "1:4". Error for anything else.
  static NodeCount parse(std::string_view text);
};

}  // namespace semitone::launch::detail
