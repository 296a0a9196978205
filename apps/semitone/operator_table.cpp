#include "apps/semitone/operator_table.h"

#include "apps/semitone/output.h"
#include "semitone/core/dtype.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <optional>
#include <ostream>
#include <string>
#include <utility>

namespace semitone::cli {
namespace {

using train::OperatorSpeed;

std::string in_ms(std::optional<double> ms) {
  return ms.has_value() ? fmt::format("{:.3f}", *ms) : "raises";
}

const char* chosen(const OperatorSpeed& speed) {
  return speed.is_native ? "native" : "emulated";
}

}  // namespace

void print(std::ostream& out, const std::vector<OperatorSpeed>& speeds) {
  constexpr auto kRow = "{:<23}  {:<8}  {:<8}  {:>8}  {:>8}  {:>8}  {}";
  out << bold(out, fmt::format(kRow, "ms a call", "pass", "dtype", "float32", "native", "emulated",
                               "chosen"))
      << '\n';
  for (const OperatorSpeed& speed : speeds) {
    out << fmt::format(kRow, name_of(speed.kind), speed.training ? "training" : "forward",
                       dtype_name(speed.dtype), in_ms(speed.fp32_ms), in_ms(speed.native_ms),
                       in_ms(speed.emulated_ms), chosen(speed))
        << '\n';
  }
}

nlohmann::ordered_json to_json(const std::vector<OperatorSpeed>& speeds) {
  auto list = nlohmann::ordered_json::array();
  for (const OperatorSpeed& speed : speeds) {
    nlohmann::ordered_json native_ms;
    if (speed.native_ms.has_value()) native_ms = *speed.native_ms;
    list.push_back({{"kind", name_of(speed.kind)},
                    {"pass", speed.training ? "training" : "forward"},
                    {"dtype", dtype_name(speed.dtype)},
                    {"gflop", speed.gflop},
                    {"fp32_ms", speed.fp32_ms},
                    {"native_ms", std::move(native_ms)},
                    {"emulated_ms", speed.emulated_ms},
                    {"chosen", chosen(speed)}});
  }
  return list;
}

}  // namespace semitone::cli
