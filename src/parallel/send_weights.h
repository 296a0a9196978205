#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/detail/replica_sync.h"

namespace semitone::parallel::detail {

// Gives all ranks the root's parameters and buffers. If an optimizer of the root has the fp32 value
// of a 16-bit parameter, that value is sent. Rounded values would remove the lower bits from the
// root's masters, and leave the other ranks with the lower bits of weights that are gone. All ranks
// call it, with equal models.
void send_weights(const ModelTensors& model, const comm::Group& group, int root);

}  // namespace semitone::parallel::detail
