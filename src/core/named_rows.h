#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

// Tables whose rows have a member `name`.
namespace semitone {

// Returns the row with that name, or nullptr.
template <typename Rows>
auto* find_row(const Rows& rows, std::string_view name) {
  const auto found = std::find_if(std::begin(rows), std::end(rows),
                                  [name](const auto& row) { return row.name == name; });
  return found == std::end(rows) ? nullptr : &*found;
}

// Returns the names of all rows.
template <typename Rows>
std::vector<std::string> names_of(const Rows& rows) {
  std::vector<std::string> names;
  for (const auto& row : rows) names.emplace_back(row.name);
  return names;
}

// Returns "a, b, c", or with another text before the last name "a, b or c".
template <typename Rows>
std::string join_names(const Rows& rows, std::string_view before_last = ", ") {
  std::string names;
  for (auto row = std::begin(rows); row != std::end(rows); ++row) {
    const bool last = std::next(row) == std::end(rows);
    if (!names.empty()) names.append(last ? before_last : ", ");
    names.append(row->name);
  }
  return names;
}

}  // namespace semitone
