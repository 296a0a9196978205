#pragma once

// Internal interface: other rooms include this header.

#include "semitone/comm/group.h"

#include <functional>
#include <string>
#include <string_view>

namespace semitone::checkpoint {

// The message of an exception, without LibTorch's stack trace.
std::string message_of(const std::exception& error);

// Runs the work, and returns when all ranks have run theirs. If it throws on one rank, all ranks
// throw: this rank its own exception, others a FileError that quotes the first rank's.
void on_all_ranks(const comm::Group& group, std::string_view component,
                  const std::function<void()>& work);

// Returns on all ranks the text of the first rank that has one, or an empty text. Collective.
std::string first_text(const comm::Group& group, const std::string& mine);

}  // namespace semitone::checkpoint
