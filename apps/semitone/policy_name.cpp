#include "apps/semitone/policy_name.h"

#include "apps/semitone/flags.h"
#include "src/core/nearest.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

namespace semitone::cli {

bool names_policy_file(const std::string& text, const std::vector<std::string>& presets,
                       std::string_view component) {
  if (std::find(presets.begin(), presets.end(), text) != presets.end()) return false;
  std::error_code ignored;
  if (std::filesystem::exists(text, ignored) || text.find_first_of("/.") != std::string::npos)
    return true;
  const std::string near = nearest(text, presets);
  throw UsageError(component,
                   fmt::format("--policy to be one of {} or a file", fmt::join(presets, ", ")),
                   "'" + text + "'", near.empty() ? "" : "did you mean " + near + "?");
}

}  // namespace semitone::cli
