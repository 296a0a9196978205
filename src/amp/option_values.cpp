#include "semitone/amp/detail/option_values.h"

#include "semitone/core/error.h"
#include "src/core/dtype_limits.h"
#include "src/core/parse_number.h"

#include <fmt/format.h>

#include <string_view>

namespace semitone::amp::detail {
namespace {

constexpr auto kLossScaleValues = "a loss scale above 0 that float32 holds, or \"dynamic\"";

std::string in_quotes(std::string_view text) {
  return fmt::format("'{}'", text);
}

}  // namespace

LossScale::LossScale(double scale) : value_(scale) {
  // fp32 losses are multiplied by it, and fp32 gradients by its inverse.
  const DtypeLimits fp32 = dtype_limits(at::kFloat);
  if (!(scale >= fp32.min_normal && scale <= fp32.max)) {
    throw Error("amp.initialize", kLossScaleValues, fmt::format("{}", scale));
  }
}

LossScale::LossScale(const std::string& scale) {
  if (scale == "dynamic") {
    dynamic_ = true;
    return;
  }
  const auto value = parse_number<double>(scale);
  if (!value.has_value()) throw Error("amp.initialize", kLossScaleValues, in_quotes(scale));
  *this = LossScale(*value);
}

std::string LossScale::to_string() const {
  return dynamic_ ? "dynamic" : fmt::format("{}", value_);
}

Flag::Flag(const std::string& text) {
  if (text != "True" && text != "False" && text != "true" && text != "false") {
    throw Error("amp.initialize", "true or false", in_quotes(text));
  }
  value_ = text == "True" || text == "true";
}

}  // namespace semitone::amp::detail
