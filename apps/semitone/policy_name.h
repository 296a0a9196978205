#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace semitone::cli {

// Whether the value of --policy names a file, and not one of the presets. UsageError of the
// component if it is neither the name of a preset, nor that of an existing file, nor contains '/'
// or '.'.
bool names_policy_file(const std::string& text, const std::vector<std::string>& presets,
                       std::string_view component);

}  // namespace semitone::cli
