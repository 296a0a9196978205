#pragma once

#include "semitone/autocast/cast_action.h"
#include "semitone/autocast/fp8_options.h"

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::amp {

inline constexpr auto kPolicyFile = "amp.cast_policy.file";
inline constexpr std::string_view kUserReason = "set by the user";

// What a policy's file states. The names of its preset and operators may be unknown ones.
struct PolicyText {
  std::string preset;
  std::vector<std::pair<std::string, CastRow>> operators;
  std::vector<std::string> fp32_param_globs;
  Emulation emulation = Emulation::automatic;
  std::optional<Fp8Options> fp8;
  std::optional<std::vector<std::string>> fast_kernels;  // null: the preset's
  bool fast_kernels_on_gpu = false;
};

// Reads the JSON that docs/cast_policies.md describes. FileError for other texts.
// @param where  the file, for messages
PolicyText parse_policy(std::string_view text, const std::string& where);

std::string to_text(const PolicyText& policy);

}  // namespace semitone::amp
