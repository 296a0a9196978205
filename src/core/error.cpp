#include "semitone/core/error.h"

#include "src/core/printable.h"

namespace semitone {
namespace {

std::string message(std::string_view component, std::string_view expected, std::string_view got,
                    std::string_view remedy) {
  std::string text;
  text.append("[").append(component).append("] expected ").append(expected);
  text.append(", got ").append(got);
  if (!remedy.empty()) text.append(" — ").append(remedy);
  return printable_lines(text);  // names come from files, and messages go to terminals
}

}  // namespace

Error::Error(std::string_view component, std::string_view expected, std::string_view got,
             std::string_view remedy)
    : std::runtime_error(message(component, expected, got, remedy)),
      component_(std::make_shared<const std::string>(component)) {}

}  // namespace semitone
