#include "src/comm/ranks.h"

#include <c10/util/Exception.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace semitone::comm {

std::string name_ranks(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    return caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "an unknown error";
  }
}

std::string seconds(double value) {
  return fmt::format("{:g} s", value);
}

}  // namespace semitone::comm
