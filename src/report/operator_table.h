#pragma once

#include <c10/core/ScalarType.h>

#include <nlohmann/json_fwd.hpp>

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>

namespace semitone::report {

// The part of the training to which an operator belongs.
enum class Pass { forward, backward, optimizer, other };

// Calls with these in common are one row.
struct OperatorKind {
  std::string_view name;  // "add.Tensor"
  Pass pass = Pass::other;
  // Of the computation; Undefined: no floating-point argument.
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::string_view kernel = "native";

  auto operator<=>(const OperatorKind&) const = default;
};

struct OperatorCost {
  std::int64_t calls = 0;
  double seconds = 0;  // without the operators inside
  std::int64_t bytes = 0;
  std::int64_t casts = 0;
  std::int64_t cached_casts = 0;
  std::int64_t cast_bytes = 0;

  OperatorCost& operator+=(const OperatorCost& other);
};

// The operators of a step.
class OperatorTable {
 public:
  void add(const OperatorKind& kind, const OperatorCost& cost);
  nlohmann::ordered_json describe() const;

 private:
  std::set<std::string, std::less<>> texts_;  // of the kinds in the table
  std::map<OperatorKind, OperatorCost> rows_;
};

}  // namespace semitone::report
