#include "semitone/launch/detail/node_count.h"

#include "semitone/core/error.h"
#include "src/core/parse_number.h"
#include "src/launch/limits.h"

#include <fmt/format.h>

namespace semitone::launch::detail {
NodeCount NodeCount::parse(std::string_view text) {
  const auto colon = text.find(':');
  const auto min = parse_number<int>(text.substr(0, colon));
  const auto max =
      colon == std::string_view::npos ? min : parse_number<int>(text.substr(colon + 1));
  if (!(min.has_value() && max.has_value() && 1 <= *min && *min <= *max && *max <= kMaxNodes)) {
    throw Error("launch.options",
                fmt::format("a number of nodes from 1 to {}, or two as in 1:4", kMaxNodes),
                fmt::format("'{}'", text));
  }
  return {*min, *max};
}

}  // namespace semitone::launch::detail
