#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/ddp_options.h"
#include "src/parallel/reduction.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace semitone::parallel {

// The mean of a flat buffer over the ranks, in the dtype and with the division that the options ask
// for.
class Averaging {
 public:
  Averaging(const DdpOptions& options, Divisor divisor);

  // Whether it is what c10d's Reducer does by itself: division by the number of ranks, and a sum.
  bool is_plain() const;

  // Starts it; the future completes with the buffer, which holds the mean then.
  c10::intrusive_ptr<c10::ivalue::Future> start(const at::Tensor& buffer,
                                                const comm::Group& group) const;

 private:
  const DdpOptions options_;
  const Divisor divisor_;
};

}  // namespace semitone::parallel
