#include "src/parallel/gradient_order.h"

#include "semitone/core/dtype.h"
#include "src/parallel/agreement.h"
#include "src/parallel/same_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace semitone::parallel::detail {
namespace {

std::string wrong_sizes(const GradientOrder& order, const DistributedDataParallelOptions& options) {
  if (order.bucket_cap_mb == options.bucket_cap_mb() &&
      order.first_bucket_mb == options.first_bucket_mb())
    return {};
  return fmt::format(
      "one for buckets of {} MiB, the first of {} MiB, where the options say {} and {}",
      order.bucket_cap_mb, order.first_bucket_mb, options.bucket_cap_mb(),
      options.first_bucket_mb());
}

// Finds the parameters by their names.
std::string wrong_names(const GradientOrder& order, const ModelTensors& model, Buckets& buckets) {
  std::unordered_map<std::string, std::size_t> unplaced;
  for (std::size_t i = 0; i < model.parameters.size(); ++i)
    unplaced.emplace(model.parameters[i].name, i);
  buckets.clear();
  buckets.reserve(order.buckets.size());
  for (const auto& names : order.buckets) {
    if (names.empty()) return "one with an empty bucket";
    std::vector<std::size_t>& bucket = buckets.emplace_back();
    bucket.reserve(names.size());
    for (const std::string& name : names) {
      const auto found = unplaced.find(name);
      if (found == unplaced.end())
        return fmt::format("one with '{}', which is no trained parameter, or is twice in it", name);
      bucket.push_back(found->second);
      unplaced.erase(found);
    }
  }
  for (const auto& entry : model.parameters) {
    if (unplaced.contains(entry.name)) return fmt::format("one without '{}'", entry.name);
  }
  return {};
}

// A bucket is one message of one dtype, and a sparse gradient is a message by itself.
bool can_share_a_bucket(const ModelTensors::Entry& one, const ModelTensors::Entry& other) {
  return !one.sparse_gradient && !other.sparse_gradient &&
         one.tensor.scalar_type() == other.tensor.scalar_type() &&
         one.tensor.device() == other.tensor.device();
}

std::string wrong_kinds(const Buckets& buckets, const ModelTensors& model) {
  const auto describe = [](const ModelTensors::Entry& entry) {
    return fmt::format("'{}' ({}{} on {})", entry.name, entry.sparse_gradient ? "sparse " : "",
                       dtype_name(entry.tensor.scalar_type()), entry.tensor.device().str());
  };
  for (const auto& bucket : buckets) {
    const ModelTensors::Entry& first = model.parameters[bucket.front()];
    for (std::size_t i = 1; i < bucket.size(); ++i) {
      const ModelTensors::Entry& other = model.parameters[bucket[i]];
      if (!can_share_a_bucket(first, other)) {
        return fmt::format("one with {} and {} in one bucket, which can be sent only apart",
                           describe(first), describe(other));
      }
    }
  }
  return {};
}

}  // namespace

GradientOrder order_of(const Buckets& buckets, const ModelTensors& model,
                       const DistributedDataParallelOptions& options) {
  GradientOrder order{{}, options.bucket_cap_mb(), options.first_bucket_mb()};
  order.buckets.reserve(buckets.size());
  for (const auto& bucket : buckets) {
    std::vector<std::string>& names = order.buckets.emplace_back();
    names.reserve(bucket.size());
    for (const std::size_t index : bucket) names.push_back(model.parameters[index].name);
  }
  return order;
}

std::string misfit_of(const GradientOrder& order, const ModelTensors& model,
                      const DistributedDataParallelOptions& options, Buckets& buckets) {
  std::string misfit = wrong_sizes(order, options);
  if (misfit.empty()) misfit = wrong_names(order, model, buckets);
  if (misfit.empty()) misfit = wrong_kinds(buckets, model);
  return misfit;
}

void require_same_order(const std::optional<GradientOrder>& order, std::string problem,
                        const comm::Group& group) {
  std::vector<Property> properties;
  if (order.has_value()) {
    properties.reserve(order->buckets.size());
    for (const auto& names : order->buckets) {
      properties.push_back({fmt::format("bucket {} of the order", properties.size()),
                            fmt::format("{}", fmt::join(names, " "))});
    }
  }
  require_agreement(properties, std::move(problem), group,
                    {.component = kDdp,
                     .expected = "an order of this model's gradients, the same on every rank",
                     .remedy = "before the first forward, set the order of a run with the same "
                               "trained parameters, dtypes and bucket sizes"});
}

}  // namespace semitone::parallel::detail
