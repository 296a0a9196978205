#include "src/report/operator_table.h"

#include <nlohmann/json.hpp>

namespace semitone::report {
namespace {

std::string_view name_of(Pass pass) {
  switch (pass) {
    case Pass::forward:
      return "forward";
    case Pass::backward:
      return "backward";
    case Pass::optimizer:
      return "optimizer";
    case Pass::other:
      break;
  }
  return "other";
}

}  // namespace

OperatorCost& OperatorCost::operator+=(const OperatorCost& other) {
  calls += other.calls;
  seconds += other.seconds;
  bytes += other.bytes;
  casts += other.casts;
  cached_casts += other.cached_casts;
  cast_bytes += other.cast_bytes;
  return *this;
}

void OperatorTable::add(const OperatorKind& kind, const OperatorCost& cost) {
  const auto found = rows_.find(kind);
  if (found != rows_.end()) {
    found->second += cost;
    return;
  }
  OperatorKind kept = kind;
  kept.name = *texts_.emplace(kind.name).first;
  kept.kernel = *texts_.emplace(kind.kernel).first;
  rows_.emplace(kept, cost);
}

nlohmann::ordered_json OperatorTable::describe() const {
  auto rows = nlohmann::ordered_json::array();
  for (const auto& [kind, cost] : rows_) {
    const bool has_dtype = kind.dtype != c10::ScalarType::Undefined;
    rows.push_back({{"name", kind.name},
                    {"pass", name_of(kind.pass)},
                    {"dtype", has_dtype ? c10::toString(kind.dtype) : ""},
                    {"kernel", kind.kernel},
                    {"calls", cost.calls},
                    {"seconds", cost.seconds},
                    {"bytes", cost.bytes},
                    {"casts", cost.casts},
                    {"cached_casts", cost.cached_casts},
                    {"cast_bytes", cost.cast_bytes}});
  }
  return rows;
}

}  // namespace semitone::report
