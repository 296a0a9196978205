#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace semitone {

// "1 step", "3 steps".
inline std::string counted(std::int64_t number, std::string_view singular,
                           std::string_view ending = "s") {
  return fmt::format("{} {}{}", number, singular, number == 1 ? "" : ending);
}

}  // namespace semitone
