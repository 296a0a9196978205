#include "src/parallel/agreement.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/comm/backends.h"
#include "src/comm/process_group.h"

#include <c10/util/DimVector.h>
#include <c10/util/StringUtil.h>

#include <fmt/format.h>

#include <sstream>
#include <unordered_map>
#include <utility>

namespace semitone::parallel {
namespace {

// Largest number of ranks in an error.
constexpr int kMostNamed = 8;

std::string to_text(const std::vector<Property>& properties) {
  std::string text;
  for (const Property& property : properties) text += property.name + "\t" + property.value + "\n";
  return text;
}

std::vector<Property> from_text(const std::string& text) {
  std::vector<Property> properties;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto tab = line.find('\t');
    properties.push_back({line.substr(0, tab), line.substr(tab + 1)});
  }
  return properties;
}

// The difference of this rank from the group's first; empty if there is none.
// @param number  of the first in the group of all processes
std::string difference(const std::vector<Property>& mine, const std::vector<Property>& first,
                       int number) {
  const auto by_name = [](const std::vector<Property>& properties) {
    std::unordered_map<std::string, std::string> values;
    for (const Property& property : properties) values.emplace(property.name, property.value);
    return values;
  };
  const auto theirs = by_name(first);
  for (const Property& property : mine) {
    const auto same = theirs.find(property.name);
    if (same == theirs.end())
      return fmt::format("{}, which rank {} does not have", property.name, number);
    if (same->second != property.value) {
      return fmt::format("{} is {}, on rank {} {}", property.name, property.value, number,
                         same->second);
    }
  }
  const auto own = by_name(mine);
  for (const Property& property : first) {
    if (!own.contains(property.name)) return "no " + property.name;
  }
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (mine[i].name != first[i].name) {
      return fmt::format("{} where rank {} has {}", mine[i].name, number, first[i].name);
    }
  }
  return {};
}

}  // namespace

void require_agreement(const std::vector<Property>& mine, std::string problem,
                       const comm::Group& group, const Disagreement& error) {
  const auto number_of = [&](std::size_t rank) {
    return comm::number_in_all(group, static_cast<int>(rank));
  };
  const std::string first = group.broadcast(to_text(mine));
  if (problem.empty()) problem = difference(mine, from_text(first), number_of(0));
  const auto problems = group.all_gather(problem);
  std::string list;
  int named = 0;
  for (std::size_t rank = 0; rank < problems.size(); ++rank) {
    if (problems[rank].empty() || ++named > kMostNamed) continue;
    list +=
        fmt::format("{}on rank {}: {}", list.empty() ? "" : "; ", number_of(rank), problems[rank]);
  }
  if (named > kMostNamed) list += fmt::format("; and on {} more ranks", named - kMostNamed);
  if (!list.empty()) throw Error(error.component, error.expected, list, error.remedy);
}

std::string describe_layout(const at::Tensor& tensor) {
  std::string text = dtype_name(tensor.scalar_type()) + c10::str(tensor.sizes());
  if (tensor.layout() != at::kStrided) return c10::str(text, ", ", tensor.layout());
  if (tensor.is_contiguous()) return text;
  c10::DimVector strides(tensor.strides());
  for (std::size_t i = 0; i < strides.size(); ++i) {
    if (tensor.sizes()[i] == 1) strides[i] = 1;  // it could be any
  }
  return c10::str(text, " with strides ", strides);
}

std::string unfit_to_send(const at::Tensor& tensor, const std::string& name,
                          const comm::Group& group) {
  const c10::Device served = group.device();
  if (group.size() == 1) return {};
  if (tensor.layout() != at::kStrided) {
    return fmt::format("{} that is not dense: keep it outside the registered tensors", name);
  }
  if (tensor.device().type() == served.type()) return {};
  return fmt::format(
      "{} on {}, which the backend {} does not serve: it has to be on {}, or the group be made by "
      "comm::init with backend(\"{}\")",
      name, tensor.device().str(), group.backend(), served.str(),
      comm::backend_for_other_device(served.type()).name);
}

}  // namespace semitone::parallel
