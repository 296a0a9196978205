#pragma once

#include "semitone/core/error.h"
#include "src/core/named_rows.h"

#include <span>
#include <string>
#include <string_view>

// Tables whose rows have names.
namespace semitone::train {

// Returns the row with that name. Error of the component, which lists the names, if there is none.
template <typename Choice>
const Choice& find_choice(std::span<const Choice> choices, std::string_view name,
                          std::string_view component) {
  if (const Choice* const found = find_row(choices, name)) return *found;
  throw Error(component, "one of " + join_names(choices), "'" + std::string(name) + "'");
}

}  // namespace semitone::train
