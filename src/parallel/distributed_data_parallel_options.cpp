#include "semitone/parallel/distributed_data_parallel_options.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

namespace semitone::parallel {
namespace {

void require_positive(double value, const char* name) {
  if (!(value > 0) || !std::isfinite(value)) {
    throw Error("parallel.ddp", fmt::format("a finite {} above 0", name), fmt::format("{}", value));
  }
}

}  // namespace

DistributedDataParallelOptions& DistributedDataParallelOptions::bucket_cap_mb(double value) {
  require_positive(value, "bucket_cap_mb");
  bucket_cap_mb_ = value;
  return *this;
}
DistributedDataParallelOptions& DistributedDataParallelOptions::first_bucket_mb(double value) {
  require_positive(value, "first_bucket_mb");
  first_bucket_mb_ = value;
  return *this;
}
DistributedDataParallelOptions& DistributedDataParallelOptions::broadcast_buffers(bool value) {
  broadcast_buffers_ = value;
  return *this;
}
DistributedDataParallelOptions& DistributedDataParallelOptions::find_unused_parameters(bool value) {
  find_unused_parameters_ = value;
  return *this;
}
DistributedDataParallelOptions& DistributedDataParallelOptions::static_graph(bool value) {
  static_graph_ = value;
  return *this;
}
DistributedDataParallelOptions& DistributedDataParallelOptions::gradient_as_bucket_view(
    bool value) {
  gradient_as_bucket_view_ = value;
  return *this;
}
DistributedDataParallelOptions& DistributedDataParallelOptions::delay_allreduce(bool value) {
  delay_allreduce_ = value;
  return *this;
}
DistributedDataParallelOptions& DistributedDataParallelOptions::gradient_predivide_factor(
    double value) {
  require_positive(value, "gradient_predivide_factor");
  gradient_predivide_factor_ = value;
  return *this;
}
DistributedDataParallelOptions& DistributedDataParallelOptions::allreduce_always_fp32(bool value) {
  allreduce_always_fp32_ = value;
  return *this;
}
DistributedDataParallelOptions& DistributedDataParallelOptions::compress(at::ScalarType value) {
  if (!is_16bit(value))
    throw Error("parallel.ddp", "compress to float16 or bfloat16", dtype_name(value));
  compress_ = value;
  return *this;
}
DistributedDataParallelOptions& DistributedDataParallelOptions::comm_hook(
    std::shared_ptr<CommHook> value) {
  comm_hook_ = std::move(value);
  return *this;
}

}  // namespace semitone::parallel
