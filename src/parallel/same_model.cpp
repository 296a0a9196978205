#include "src/parallel/same_model.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <c10/util/StringUtil.h>

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace semitone::parallel {
namespace {

constexpr auto kWhere = "parallel.ddp";

// An error names no more ranks than this.
constexpr int kMostNamed = 8;

// What has to be equal: a kind, a name and a value each.
struct Property {
  std::string name;   // "parameter 'fc.weight'"
  std::string value;  // "float32[3, 4]"
};

std::vector<Property> properties_of(const ModelTensors& model, const DdpOptions& options) {
  std::vector<Property> properties;
  const auto add = [&](const std::string& kind, const ModelTensors::Entry& entry) {
    const at::Tensor& tensor = entry.tensor;
    properties.push_back(
        {fmt::format("{} '{}'", kind, entry.name),
         fmt::format("{}{}{}{}", dtype_name(tensor.scalar_type()), c10::str(tensor.sizes()),
                     tensor.requires_grad() ? "" : " without gradient",
                     entry.sparse_gradient ? " with sparse gradient" : "")});
  };
  for (const auto& entry : model.parameters) add("parameter", entry);
  for (const auto& entry : model.buffers) add("buffer", entry);
  const auto option = [&](const std::string& name, const auto& value) {
    properties.push_back({"the option " + name, fmt::format("{}", value)});
  };
  option("bucket_cap_mb", options.bucket_cap_mb());
  option("first_bucket_mb", options.first_bucket_mb());
  option("broadcast_buffers", options.broadcast_buffers());
  option("find_unused_parameters", options.find_unused_parameters());
  option("static_graph", options.static_graph());
  option("delay_allreduce", options.delay_allreduce());
  option("gradient_predivide_factor", options.gradient_predivide_factor().value_or(0));
  option("allreduce_always_fp32", options.allreduce_always_fp32());
  option("compress", options.compress().has_value() ? dtype_name(*options.compress()) : "none");
  option("comm_hook", options.comm_hook() != nullptr);
  return properties;
}

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

// How mine differs from rank 0's; empty if it does not.
std::string difference(const std::vector<Property>& mine, const std::vector<Property>& first) {
  const auto by_name = [](const std::vector<Property>& properties) {
    std::unordered_map<std::string, std::string> values;
    for (const Property& property : properties) values.emplace(property.name, property.value);
    return values;
  };
  const auto theirs = by_name(first);
  for (const Property& property : mine) {
    const auto same = theirs.find(property.name);
    if (same == theirs.end()) return property.name + ", which rank 0 does not have";
    if (same->second != property.value) {
      return fmt::format("{} is {}, on rank 0 {}", property.name, property.value, same->second);
    }
  }
  const auto own = by_name(mine);
  for (const Property& property : first) {
    if (!own.contains(property.name)) return "no " + property.name;
  }
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (mine[i].name != first[i].name) {
      return fmt::format("{} where rank 0 has {}", mine[i].name, first[i].name);
    }
  }
  return {};
}

// What makes the model unfit on any rank; empty if nothing does.
std::string unfitness(const ModelTensors& model, const comm::Group& group,
                      const DdpOptions& options) {
  const auto device = group.backend() == "nccl" ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  bool trainable = false;
  for (const auto* entries : {&model.parameters, &model.buffers}) {
    for (const auto& entry : *entries) {
      const at::Tensor& tensor = entry.tensor;
      trainable = trainable || tensor.requires_grad();
      if (group.size() > 1 && tensor.device().type() != device) {
        return fmt::format("'{}' on {}, which the backend {} does not serve", entry.name,
                           tensor.device().str(), group.backend());
      }
      if (entry.sparse_gradient && (options.delay_allreduce() || options.comm_hook() != nullptr ||
                                    options.allreduce_always_fp32() || options.compress() ||
                                    options.gradient_predivide_factor())) {
        return fmt::format("'{}' with a sparse gradient, which only the plain mean can take",
                           entry.name);
      }
    }
  }
  return trainable ? "" : "no parameter that needs a gradient";
}

}  // namespace

void require_same_model(const ModelTensors& model, const comm::Group& group,
                        const DdpOptions& options) {
  const auto mine = properties_of(model, options);
  std::string problem = unfitness(model, group, options);
  const std::string first = group.broadcast(to_text(mine));
  if (problem.empty()) problem = difference(mine, from_text(first));
  const auto problems = group.all_gather(problem);
  std::string list;
  int named = 0;
  for (std::size_t rank = 0; rank < problems.size(); ++rank) {
    if (problems[rank].empty() || ++named > kMostNamed) continue;
    list += fmt::format("{}on rank {}: {}", list.empty() ? "" : "; ", rank, problems[rank]);
  }
  if (named > kMostNamed) list += fmt::format("; and on {} more ranks", named - kMostNamed);
  if (!list.empty()) {
    throw Error(kWhere, "one trainable model, the same on every rank", list,
                "construct the model and its options in the same way on all ranks");
  }
}

void require_consistent(const DdpOptions& options) {
  const auto exclude = [](bool both, const char* first, const char* second) {
    if (both) throw Error(kWhere, fmt::format("{} or {}", first, second), "both");
  };
  exclude(options.delay_allreduce() && options.find_unused_parameters(), "delay_allreduce",
          "find_unused_parameters");
  exclude(options.delay_allreduce() && options.static_graph(), "delay_allreduce", "static_graph");
  exclude(options.delay_allreduce() && options.gradient_as_bucket_view(), "delay_allreduce",
          "gradient_as_bucket_view");
  const bool hook = options.comm_hook() != nullptr;
  exclude(options.delay_allreduce() && hook, "delay_allreduce", "comm_hook");
  exclude(hook && options.compress().has_value(), "comm_hook", "compress");
  exclude(hook && options.allreduce_always_fp32(), "comm_hook", "allreduce_always_fp32");
  exclude(hook && options.gradient_predivide_factor().has_value(), "comm_hook",
          "gradient_predivide_factor");
}

}  // namespace semitone::parallel
