#include "src/parallel/averaging.h"

#include "semitone/core/dtype.h"
#include "src/comm/process_group.h"

#include <torch/types.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

namespace semitone::parallel::detail {
namespace {

// The dtype in which a buffer is sent.
at::ScalarType wire_dtype(at::ScalarType dtype, const DistributedDataParallelOptions& options) {
  if (options.allreduce_always_fp32() && is_16bit(dtype)) return at::kFloat;
  if (options.compress().has_value() && (dtype == at::kFloat || dtype == at::kDouble))
    return *options.compress();
  return dtype;
}

}  // namespace

Averaging::Averaging(const DistributedDataParallelOptions& options, Divisor divisor)
    : options_(options), divisor_(std::move(divisor)) {}

bool Averaging::is_plain() const {
  return !options_.allreduce_always_fp32() && !options_.compress().has_value() &&
         !options_.gradient_predivide_factor().has_value();
}

c10::intrusive_ptr<c10::ivalue::Future> Averaging::start(const at::Tensor& buffer,
                                                         const comm::Group& group) const {
  const auto count = static_cast<double>(divisor_());
  // With 16 bits, dividing by the root of the number of ranks before and after the sum keeps both
  // the summands and the sum as far as possible from the ends of the range.
  const double before = options_.gradient_predivide_factor().value_or(
      options_.compress().has_value() ? std::sqrt(count) : count);
  const double after = count / before;
  // Divided in the wider of the two dtypes.
  const auto wire_type = wire_dtype(buffer.scalar_type(), options_);
  at::Tensor wire;
  if (at::elementSize(wire_type) > at::elementSize(buffer.scalar_type())) {
    wire = buffer.to(wire_type).div_(before);
  } else {
    wire = buffer.div_(before).to(wire_type);
  }
  std::vector<at::Tensor> tensors{wire};
  const auto sum = comm::process_group(group)->allreduce(tensors)->getFuture();
  return sum->then(
      [buffer, wire, after](c10::ivalue::Future& done) -> c10::IValue {
        done.value();  // throws if it failed
        if (!wire.is_same(buffer)) {
          if (at::elementSize(wire.scalar_type()) > at::elementSize(buffer.scalar_type())) {
            if (after != 1) wire.div_(after);
            buffer.copy_(wire);
            return buffer;
          }
          buffer.copy_(wire);
        }
        if (after != 1) buffer.div_(after);
        return buffer;
      },
      c10::TensorType::get());
}

c10::intrusive_ptr<c10::ivalue::Future> mean_async(at::Tensor gradients, const comm::Group& group) {
  if (group.size() > 1) gradients.div_(group.size());
  return group.all_reduce_async(gradients, comm::ReduceOp::sum).future();
}

}  // namespace semitone::parallel::detail
