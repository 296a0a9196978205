#include "src/autocast/op_names.h"

#include "semitone/core/error.h"
#include "src/core/nearest.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

constexpr std::string_view kAten = "aten::";

// Splits "ns::op.overload" into "ns::op" and "overload"; a name without a namespace is ATen's.
c10::OperatorName parse(std::string_view name) {
  const auto dot = name.find('.');
  const std::string_view overload =
      dot == std::string_view::npos ? std::string_view() : name.substr(dot + 1);
  const std::string_view base = name.substr(0, dot);
  const bool is_aten = base.find("::") == std::string_view::npos;
  return {std::string(is_aten ? kAten : "").append(base), std::string(overload)};
}

}  // namespace

std::string display_name(const c10::OperatorName& name) {
  std::string_view base = name.name;
  if (base.substr(0, kAten.size()) == kAten) base.remove_prefix(kAten.size());
  std::string text(base);
  if (!name.overload_name.empty()) text.append(".").append(name.overload_name);
  return text;
}

std::string display_name(std::string_view name) {
  return display_name(parse(name));
}

bool is_aten(const c10::OperatorName& name) {
  return name.name.rfind(kAten, 0) == 0;
}

std::optional<c10::OperatorHandle> find_operator(std::string_view name) {
  return c10::Dispatcher::singleton().findSchema(parse(name));
}

const std::map<std::string, std::vector<c10::OperatorHandle>>& aten_operators() {
  using Operators = std::map<std::string, std::vector<c10::OperatorHandle>>;
  static const auto* const operators = new Operators([] {
    Operators by_base;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (!is_aten(name)) continue;
      const auto op = dispatcher.findSchema(name);
      if (op.has_value()) by_base[name.name.substr(kAten.size())].push_back(*op);
    }
    return by_base;
  }());
  return *operators;
}

bool writes_to_argument(const c10::OperatorHandle& op) {
  return op.schema().is_mutable();
}

namespace {

std::vector<c10::OperatorHandle> overloads_of(const c10::OperatorName& wanted) {
  if (is_aten(wanted)) {
    const auto& aten = aten_operators();
    const auto found = aten.find(wanted.name.substr(kAten.size()));
    if (found != aten.end()) return found->second;
  }
  // Other libraries may register theirs at any time.
  std::vector<c10::OperatorHandle> overloads;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name != wanted.name) continue;
    if (const auto op = dispatcher.findSchema(name)) overloads.push_back(*op);
  }
  return overloads;
}

}  // namespace

std::vector<c10::OperatorHandle> resolve_operators(std::string_view name, std::string_view caller) {
  const c10::OperatorName wanted = parse(name);
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorHandle> found;
  if (!wanted.overload_name.empty()) {
    if (const auto op = dispatcher.findSchema(wanted)) found.push_back(*op);
  } else {
    found = overloads_of(wanted);
    std::vector<c10::OperatorHandle> out_of_place;
    std::copy_if(found.begin(), found.end(), std::back_inserter(out_of_place),
                 [](const c10::OperatorHandle& op) { return !writes_to_argument(op); });
    if (!out_of_place.empty()) found = std::move(out_of_place);
  }
  if (!found.empty()) return found;

  std::set<std::string> known_names;
  for (c10::OperatorName registered : dispatcher.getAllOpNames()) {
    if (wanted.overload_name.empty()) registered.overload_name.clear();
    known_names.insert(display_name(registered));
  }
  const std::string near = nearest(display_name(wanted), {known_names.begin(), known_names.end()});
  throw Error(
      caller, "the name of a registered operator", "'" + std::string(name) + "'",
      near.empty()
          ? "ATen names as in at::conv2d, or namespace::name for operators of other libraries"
          : "did you mean " + near + "?");
}

}  // namespace semitone::amp
