#include "src/amp/op_names.h"

#include "semitone/core/error.h"

#include <algorithm>
#include <numeric>
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

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t substitute = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, substitute});
    }
  }
  return row[b.size()];
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

bool writes_to_argument(const c10::OperatorHandle& op) {
  return op.schema().is_mutable();
}

std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  std::vector<std::pair<std::size_t, const std::string*>> ranked;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(name, candidate);
    if (distance <= std::max<std::size_t>(2, name.size() / 3))
      ranked.emplace_back(distance, &candidate);
  }
  const auto closer = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : *a.second < *b.second;
  };
  const std::size_t count = std::min<std::size_t>(3, ranked.size());
  std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(count),
                    ranked.end(), closer);
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) text += i + 1 == count ? " or " : ", ";
    text.append("'").append(*ranked[i].second).append("'");
  }
  return text;
}

std::vector<c10::OperatorHandle> resolve_operators(std::string_view name, std::string_view caller) {
  const c10::OperatorName wanted = parse(name);
  auto& dispatcher = c10::Dispatcher::singleton();
  std::vector<c10::OperatorHandle> found;
  if (!wanted.overload_name.empty()) {
    if (const auto op = dispatcher.findSchema(wanted)) found.push_back(*op);
  } else {
    std::vector<c10::OperatorHandle> writing;
    for (const c10::OperatorName& known : dispatcher.getAllOpNames()) {
      if (known.name != wanted.name) continue;
      if (const auto op = dispatcher.findSchema(known))
        (writes_to_argument(*op) ? writing : found).push_back(*op);
    }
    if (found.empty()) found = std::move(writing);
  }
  if (!found.empty()) return found;

  std::set<std::string> known_names;
  for (c10::OperatorName known : dispatcher.getAllOpNames()) {
    if (wanted.overload_name.empty()) known.overload_name.clear();
    known_names.insert(display_name(known));
  }
  const std::string near = nearest(display_name(wanted), {known_names.begin(), known_names.end()});
  throw Error(
      caller, "the name of a registered operator", "'" + std::string(name) + "'",
      near.empty()
          ? "ATen names as in at::conv2d, or namespace::name for operators of other libraries"
          : "did you mean " + near + "?");
}

}  // namespace semitone::amp
