#pragma once

#include "semitone/autocast/cast_policy.h"

#include <string>
#include <string_view>

// The value of --policy: the name of a preset, or a file.
namespace semitone::cli {

// What --help shows as its type.
inline constexpr auto kPolicyType = "NAME|FILE";

// "semitone, torch, …, or a file of semitone tune", for --help.
std::string policy_choices();

// Returns the policy that --policy names: a preset, or else a file. A text that is neither an existing
// file nor contains '/' or '.' is a UsageError. FileError if the file has no policy.
amp::CastPolicy policy_of(const std::string& text, amp::CastTarget target,
                          std::string_view component);

}  // namespace semitone::cli
