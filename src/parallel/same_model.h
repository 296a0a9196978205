#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/detail/replica_sync.h"
#include "semitone/parallel/distributed_data_parallel_options.h"

namespace semitone::parallel::detail {

// The component in errors.
inline constexpr auto kDdp = "parallel.ddp";

// Unless all ranks have the same model and options, and the model can be trained: Error on every
// rank, naming rank and parameter.
void require_same_model(const ModelTensors& model, const comm::Group& group,
                        const DistributedDataParallelOptions& options);

// Error for options that exclude each other.
void require_consistent(const DistributedDataParallelOptions& options);

}  // namespace semitone::parallel::detail
