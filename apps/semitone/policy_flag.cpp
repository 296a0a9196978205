#include "apps/semitone/policy_flag.h"

#include "apps/semitone/flags.h"
#include "src/core/nearest.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <vector>

namespace semitone::cli {

std::string policy_choices() {
  return fmt::format("{}, or a file that semitone tune or CastPolicy::save wrote",
                     fmt::join(amp::CastPolicy::preset_names(), ", "));
}

amp::CastPolicy policy_of(const std::string& text, amp::CastTarget target,
                          std::string_view component) {
  const std::vector<std::string> presets = amp::CastPolicy::preset_names();
  if (std::find(presets.begin(), presets.end(), text) != presets.end())
    return amp::CastPolicy::by_name(text, target);
  std::error_code ignored;
  if (std::filesystem::exists(text, ignored) || text.find_first_of("/.") != std::string::npos)
    return amp::CastPolicy::from_file(text, target);
  const std::string near = nearest(text, presets);
  throw UsageError(component,
                   fmt::format("--policy to be one of {} or a file", fmt::join(presets, ", ")),
                   "'" + text + "'", near.empty() ? "" : "did you mean " + near + "?");
}

}  // namespace semitone::cli
