#include "semitone/report/nonfinite_finding.h"

#include "semitone/core/dtype.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

namespace semitone::report {
namespace {

constexpr auto kFinding = "report.nonfinite_check";
using Origin = NonFiniteFinding::Origin;

// "3 nan, 1 inf and 2 -inf".
std::string counts(const TensorValues& values) {
  std::vector<std::string> parts;
  if (values.nans > 0) parts.push_back(fmt::format("{} nan", values.nans));
  if (values.positive_infs > 0) parts.push_back(fmt::format("{} inf", values.positive_infs));
  if (values.negative_infs > 0) parts.push_back(fmt::format("{} -inf", values.negative_infs));
  if (parts.size() < 2) return parts.empty() ? "" : parts.front();
  const std::string last = parts.back();
  parts.pop_back();
  return fmt::format("{} and {}", fmt::join(parts, ", "), last);
}

std::string type_of(const TensorValues& values) {
  return fmt::format("{} [{}]", dtype_name(values.dtype), fmt::join(values.sizes, ", "));
}

std::string range_of(const TensorValues& values) {
  if (std::isnan(values.min)) return {};
  return fmt::format("from {:.6g} to {:.6g}", values.min, values.max);
}

// What is not finite, and where in the tensor.
std::string description(const TensorValues& values) {
  std::string text = fmt::format("{} in {} ({}", counts(values), values.name, type_of(values));
  if (!values.first.empty()) text += fmt::format(", first at [{}]", fmt::join(values.first, ", "));
  const std::string range = range_of(values);
  return text + (range.empty() ? ")" : ", otherwise " + range + ")");
}

std::string what(const NonFiniteFinding& finding) {
  const TensorValues& values = finding.values;
  const std::string parameter =
      values.parameter.empty() ? "" : fmt::format(" of parameter '{}'", values.parameter);
  switch (finding.origin) {
    case Origin::op:
      return fmt::format("operator '{}' made {}", finding.op, description(values));
    case Origin::function:
      return finding.backward
                 ? fmt::format("the backward function of '{}' returned {}{}", finding.op,
                               description(values), parameter)
                 : fmt::format("function '{}' returned {}", finding.op, description(values));
    case Origin::outside:
      break;
  }
  return fmt::format("operator '{}' got {}{}, which no watched operator made", finding.op,
                     description(values), parameter);
}

std::string place(const NonFiniteFinding& finding) {
  std::string text;
  if (finding.backward) {
    text += ", in the backward pass";
    if (!finding.forward_op.empty()) text += fmt::format(" of '{}'", finding.forward_op);
    if (!finding.node.empty()) text += fmt::format(" ({})", finding.node);
  } else {
    text += ", in the forward pass";
  }
  if (!finding.called_by.empty())
    text += fmt::format(", called by '{}'", fmt::join(finding.called_by, "' by '"));
  if (!finding.layer.empty())
    text += fmt::format(" {} layer '{}'", finding.is_after_layer ? "after" : "in", finding.layer);
  text += fmt::format(", at step {}", finding.step);
  if (finding.rank.has_value()) text += fmt::format(" on rank {}", *finding.rank);
  return text;
}

std::string remedy(const NonFiniteFinding& finding) {
  switch (finding.origin) {
    case Origin::op:
      return "check the arguments; if the values are intended, name the operator in "
             "NonFiniteCheckOptions::ignore";
    case Origin::function:
      return "check its arguments first, then its code";
    case Origin::outside:
      break;
  }
  return finding.values.parameter.empty()
             ? "check the batch, what other ranks sent, or an earlier step that was not looked at"
             : "look for what made this parameter so: an earlier step that was not looked at, or "
               "the "
               "file it is from";
}

}  // namespace

std::string TensorValues::to_string() const {
  std::string text = fmt::format("{} {}", name, type_of(*this));
  if (!parameter.empty()) text = fmt::format("{} ('{}') {}", name, parameter, type_of(*this));
  if (overwritten) return text + " changed in place";
  const std::string range = range_of(*this);
  if (!range.empty()) text += " " + range;
  if (has_non_finite()) text += fmt::format("{}{}", range.empty() ? " " : " with ", counts(*this));
  return text;
}

std::string NonFiniteFinding::to_string() const {
  std::string text = what(*this) + place(*this);
  for (std::size_t i = 0; i < arguments.size(); ++i)
    text += (i == 0 ? "; its arguments: " : ", ") + arguments[i].to_string();
  return text;
}

NonFiniteError::NonFiniteError(NonFiniteFinding finding)
    : DivergedError(kFinding, "finite results of all operators", finding.to_string(),
                    remedy(finding)),
      finding_(std::make_shared<const NonFiniteFinding>(std::move(finding))) {}

}  // namespace semitone::report
