#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/ddp_options.h"
#include "semitone/parallel/replica_sync.h"

namespace semitone::parallel {

// Who speaks in errors.
inline constexpr auto kDdp = "parallel.ddp";

// Error on every rank, which names rank and parameter, unless all ranks have the same model and
// options, and one that can be trained.
void require_same_model(const ModelTensors& model, const comm::Group& group,
                        const DdpOptions& options);

// Error for options that exclude each other.
void require_consistent(const DdpOptions& options);

}  // namespace semitone::parallel
