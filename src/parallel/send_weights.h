#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/replica_sync.h"

namespace semitone::parallel {

// Gives all ranks the root's parameters and buffers. Where an optimizer of the root has the fp32
// value of a 16-bit parameter it is that which is sent: rounded ones would take the lower bits from
// the root's masters, and leave the other ranks those of weights that they have no more. All ranks
// call it, with models whose tensors are alike.
void send_weights(const ModelTensors& model, const comm::Group& group, int root);

}  // namespace semitone::parallel
