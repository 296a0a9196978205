#pragma once

#include "src/kernels/updates.h"

#include <tuple>

namespace semitone::test {

// Calls visit(Rule()) for each optimizer's rule.
template <typename Visit>
void for_all_rules(const Visit& visit) {
  std::apply([&](const auto&... rule) { (visit(rule), ...); }, kernels::AllRules());
}

}  // namespace semitone::test
