#pragma once

#include "semitone/core/error.h"

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

// Tables whose rows have names.
namespace semitone::train {

// Returns the row with that name. Error of the component, which lists the names, if there is none.
template <typename Choice>
const Choice& find_choice(std::span<const Choice> choices, std::string_view name,
                          std::string_view component) {
  const auto found = std::find_if(choices.begin(), choices.end(),
                                  [name](const Choice& choice) { return choice.name == name; });
  if (found != choices.end()) return *found;
  std::string names;
  for (const Choice& choice : choices) names.append(names.empty() ? "" : ", ").append(choice.name);
  throw Error(component, "one of " + names, "'" + std::string(name) + "'");
}

}  // namespace semitone::train
