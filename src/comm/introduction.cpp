#include "src/comm/introduction.h"

#include "semitone/core/error.h"
#include "src/comm/network.h"
#include "src/comm/ranks.h"
#include "src/comm/watch_messages.h"

#include <fmt/format.h>

#include <cstddef>
#include <map>

namespace semitone::comm {
namespace {

// A setting that all ranks must share.
struct Setting {
  const char* name;
  std::string Introduction::* value;
  const char* remedy;
};

// A difference in an earlier one explains those in later ones.
constexpr Setting kSettings[] = {
    {"a world size of", &Introduction::world_size, "start all ranks with the same world size"},
    {"the backend", &Introduction::backend,
     "choose the same one on all ranks with InitOptions::backend: \"auto\" is gloo on a rank "
     "without a visible GPU"},
    {"the check level", &Introduction::check_level,
     "set SEMITONE_COMM_CHECK or InitOptions::check to the same level on all ranks"},
};

}  // namespace

std::string to_string(const Introduction& introduction) {
  return fmt::format("{} {} {} {}", introduction.world_size, introduction.backend,
                     introduction.check_level, to_string(introduction.machine));
}

Introduction parse_introduction(std::string_view text) {
  Introduction introduction;
  introduction.world_size = next_word(text);
  introduction.backend = next_word(text);
  introduction.check_level = next_word(text);
  introduction.machine = parse_machine(std::string(text));
  return introduction;
}

void require_equal_settings(const Introduction& own, const std::vector<Introduction>& ranks) {
  for (const Setting& setting : kSettings) {
    std::map<std::string, std::vector<int>> others;
    std::vector<int> different;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const std::string& value = ranks[rank].*setting.value;
      if (value == own.*setting.value) continue;
      others[value].push_back(static_cast<int>(rank));
      different.push_back(static_cast<int>(rank));
    }
    if (different.empty()) continue;
    std::string list;
    for (const auto& [value, with_it] : others)
      list += fmt::format("{}{} on {}", list.empty() ? "" : ", ", value, name_ranks(with_it));
    throw CommError(kInitComponent,
                    fmt::format("{} {} on all ranks", setting.name, own.*setting.value), list,
                    setting.remedy, different);
  }
}

}  // namespace semitone::comm
