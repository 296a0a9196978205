#include "apps/semitone/policy_flag.h"

#include "apps/semitone/policy_name.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace semitone::cli {

std::string policy_choices() {
  return fmt::format("{}, or a file that semitone tune or CastPolicy::save wrote",
                     fmt::join(amp::CastPolicy::preset_names(), ", "));
}

amp::CastPolicy policy_of(const std::string& text, amp::CastTarget target,
                          std::string_view component) {
  return names_policy_file(text, amp::CastPolicy::preset_names(), component)
             ? amp::CastPolicy::from_file(text, target)
             : amp::CastPolicy::by_name(text, target);
}

}  // namespace semitone::cli
