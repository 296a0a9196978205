#include "src/checkpoint/agree.h"

#include "semitone/core/error.h"

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

namespace semitone::checkpoint {

std::string message_of(const std::exception& error) {
  const auto* const from_torch = dynamic_cast<const c10::Error*>(&error);
  const std::string text =
      from_torch == nullptr ? error.what() : from_torch->what_without_backtrace();
  const std::size_t begin = text.find_first_not_of('\n');
  if (begin == std::string::npos) return "an exception without a message";
  return text.substr(begin, text.find('\n', begin) - begin);
}

void on_all_ranks(const comm::Group& group, std::string_view component,
                  const std::function<void()>& work) {
  std::exception_ptr own;
  std::string message;
  try {
    work();
  } catch (const CommError&) {
    throw;  // the ranks are lost: there is no agreement with them
  } catch (const std::exception& error) {
    own = std::current_exception();
    message = message_of(error);
  } catch (...) {
    own = std::current_exception();
    message = "an exception that is no std::exception";
  }
  const std::vector<std::string> messages = group.all_gather(message);
  if (own) std::rethrow_exception(own);
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    if (messages[rank].empty()) continue;
    throw FileError(component, "success on every rank",
                    fmt::format("on rank {}: {}", rank, messages[rank]));
  }
}

std::string first_text(const comm::Group& group, const std::string& mine) {
  const std::vector<std::string> all = group.all_gather(mine);
  const auto found = std::ranges::find_if_not(all, &std::string::empty);
  return found == all.end() ? std::string() : *found;
}

}  // namespace semitone::checkpoint
