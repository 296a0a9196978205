#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/detail/replica_sync.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
#include "semitone/parallel/gradient_order.h"

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace semitone::parallel::detail {

// The parameters of each bucket, as indices of ModelTensors::parameters.
using Buckets = std::vector<std::vector<std::size_t>>;

// The order of these buckets.
GradientOrder order_of(const Buckets& buckets, const ModelTensors& model,
                       const DistributedDataParallelOptions& options);

// Why an order is not one of the model's parameters, each of them once, in buckets that Reducer can
// send and of the options' sizes. Empty if it is, and then `buckets` are its buckets.
std::string misfit_of(const GradientOrder& order, const ModelTensors& model,
                      const DistributedDataParallelOptions& options, Buckets& buckets);

// Unless all ranks have the same order, or none: Error on every rank, naming ranks and a bucket. A
// problem that one rank has found itself is reported to all.
void require_same_order(const std::optional<GradientOrder>& order, std::string problem,
                        const comm::Group& group);

}  // namespace semitone::parallel::detail
