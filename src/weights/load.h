#pragma once

#include "semitone/weights/state_dict.h"

#include <string>
#include <string_view>

namespace semitone::weights {

// load_state_dict for the values of a source, with its messages.
// @param component  of errors: "weights.load"
// @param in         "" or " in 'PATH'", for messages
UnmatchedNames load_values(const amp::Model& model, const StateDict& values,
                           const LoadOptions& options, std::string_view component,
                           const std::string& in);

}  // namespace semitone::weights
