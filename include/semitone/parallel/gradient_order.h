#pragma once

#include <string>
#include <vector>

namespace semitone::parallel {

/// The order in which DistributedDataParallel sums gradients: which gradients share a bucket, and
/// where in it. With three or more ranks the rounding of a sum depends on its place in the bucket.
///
/// A new DistributedDataParallel lays out its buckets after its first step, in the order in which
/// rank 0's gradients became ready. A resumed training that sets the order of the saved one
/// therefore has the same sums, bit for bit.
struct GradientOrder {
  /// The names of each bucket's parameters, in the order of their gradients in the bucket. The
  /// first bucket is sent first.
  std::vector<std::vector<std::string>> buckets;
  double bucket_cap_mb = 0;    ///< DistributedDataParallelOptions::bucket_cap_mb of these buckets
  double first_bucket_mb = 0;  ///< DistributedDataParallelOptions::first_bucket_mb of these buckets

  bool operator==(const GradientOrder&) const = default;
};

}  // namespace semitone::parallel
