#include "src/parallel/same_model.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/comm/process_group.h"
#include "src/parallel/agreement.h"

#include <c10/util/StringUtil.h>

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

namespace semitone::parallel::detail {
namespace {

std::vector<Property> properties_of(const ModelTensors& model,
                                    const DistributedDataParallelOptions& options) {
  std::vector<Property> properties;
  properties.reserve(model.parameters.size() + model.buffers.size());
  // Gradients are sent in memory order, which is that of their parameters. Buffers are sent in the
  // order of their elements.
  for (const auto& [name, tensor, sparse_gradient] : model.parameters) {
    properties.push_back({fmt::format("parameter '{}'", name),
                          fmt::format("{}{}{}", describe_layout(tensor),
                                      tensor.requires_grad() ? "" : " without gradient",
                                      sparse_gradient ? " with sparse gradient" : "")});
  }
  for (const auto& [name, tensor, sparse_gradient] : model.buffers) {
    properties.push_back({fmt::format("buffer '{}'", name),
                          dtype_name(tensor.scalar_type()) + c10::str(tensor.sizes())});
  }
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

// Why no rank can train the model; empty if all can.
std::string unfitness(const ModelTensors& model, const comm::Group& group,
                      const DistributedDataParallelOptions& options) {
  const bool trainable =
      std::any_of(model.parameters.begin(), model.parameters.end(),
                  [](const auto& entry) { return entry.tensor.requires_grad(); });
  for (const auto* entries : {&model.parameters, &model.buffers}) {
    for (const auto& entry : *entries) {
      std::string unfit = unfit_to_send(entry.tensor, "'" + entry.name + "'", group);
      if (!unfit.empty()) return unfit;
      const bool is_sparse = entry.sparse_gradient && entry.tensor.requires_grad();
      if (is_sparse && (options.delay_allreduce() || options.comm_hook() != nullptr ||
                        options.allreduce_always_fp32() || options.compress() ||
                        options.gradient_predivide_factor())) {
        return fmt::format("'{}' with a sparse gradient, which only the plain mean can take",
                           entry.name);
      }
    }
  }
  for (const auto& entry : model.parameters) {
    if (options.comm_hook() != nullptr) break;  // it may send something else
    const at::ScalarType dtype = entry.tensor.scalar_type();
    if (!entry.tensor.requires_grad() || comm::can_add_up(group, dtype)) continue;
    const char* const remedy = entry.tensor.is_complex()
                                   ? "real numbers, as torch::view_as_real returns them"
                                   : "fp32, fp16 or bf16";
    return fmt::format("'{}' of {}, whose gradient the backend {} cannot add up: store it as {}",
                       entry.name, dtype_name(dtype), group.backend(), remedy);
  }
  return trainable ? "" : "no parameter that needs a gradient";
}

}  // namespace

void require_same_model(const ModelTensors& model, const comm::Group& group,
                        const DistributedDataParallelOptions& options) {
  require_agreement(properties_of(model, options), unfitness(model, group, options), group,
                    {.component = kDdp,
                     .expected = "one trainable model, the same on every rank",
                     .remedy = "construct the model and its options in the same way on all ranks"});
}

void require_consistent(const DistributedDataParallelOptions& options) {
  const auto exclude = [](bool both, const char* first, const char* second) {
    if (both) throw Error(kDdp, fmt::format("{} or {}", first, second), "both");
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

}  // namespace semitone::parallel::detail
