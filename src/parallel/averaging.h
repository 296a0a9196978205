#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
#include "src/parallel/reduction.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace semitone::parallel::detail {

// The mean of a flat buffer over the ranks, in the dtype and with the division that the options
// request.
class Averaging {
 public:
  Averaging(const DistributedDataParallelOptions& options, Divisor divisor);

  // Whether c10d's Reducer does the same itself: division by the number of ranks, and a sum.
  bool is_plain() const;

  // Starts the reduction. The future completes with the buffer, which then holds the mean.
  c10::intrusive_ptr<c10::ivalue::Future> start(const at::Tensor& buffer,
                                                const comm::Group& group) const;

 private:
  const DistributedDataParallelOptions options_;
  const Divisor divisor_;
};

// The same without options, also in a group of one process: in fp16 the sum of N ranks may be
// infinite where the mean is not, so the gradients are divided first.
c10::intrusive_ptr<c10::ivalue::Future> mean_async(at::Tensor gradients, const comm::Group& group);

}  // namespace semitone::parallel::detail
