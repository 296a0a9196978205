#include "src/comm/ranks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace semitone::comm {

std::string name_ranks(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

std::string seconds(double value) {
  return fmt::format("{:g} s", value);
}

}  // namespace semitone::comm
