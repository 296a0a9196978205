#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// What the tests of DistributedDataParallel have in common, beside their models (models.h).
namespace semitone::test {

// fp64, 20 steps: what the order of additions may change.
inline constexpr double kSumTolerance = 1e-12;

inline void expect_near(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want,
                        double tolerance = kSumTolerance) {
  EXPECT_TRUE(near(got, want, tolerance));
}

// Bit for bit.
inline void expect_equal_on_all_ranks(const comm::Group& group,
                                      const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    for (const at::Tensor& other : group.all_gather(tensor.detach().contiguous()))
      EXPECT_TRUE(same_bits(other, tensor.detach()));
  }
}

// Averages in a custom hook, as a program would.
class MeanHook final : public parallel::CommHook {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> reduce(const parallel::GradientBucket& bucket,
                                                 const comm::Group& group) override {
    std::int64_t elements = 0;
    for (const at::Tensor& parameter : bucket.parameters) elements += parameter.numel();
    EXPECT_EQ(bucket.buffer.numel(), elements);
    at::Tensor gradients = bucket.buffer;
    return group.all_reduce_async(gradients, comm::ReduceOp::mean).future();
  }
};

// Ways of reducing that must all give the same results.
inline std::vector<std::pair<std::string, parallel::DistributedDataParallelOptions>> all_ways() {
  using Options = parallel::DistributedDataParallelOptions;
  return {
      {"default", Options()},
      {"views", Options().gradient_as_bucket_view(true)},
      {"small buckets", Options().bucket_cap_mb(0.0002).first_bucket_mb(0.0001)},
      {"find_unused", Options().find_unused_parameters(true)},
      {"find_unused, views",
       Options().find_unused_parameters(true).gradient_as_bucket_view(true).bucket_cap_mb(0.0002)},
      {"static_graph", Options().static_graph(true)},
      {"delay_allreduce", Options().delay_allreduce(true)},
      {"predivide", Options().gradient_predivide_factor(1.5)},
      {"delayed, predivide", Options().delay_allreduce(true).gradient_predivide_factor(8)},
      {"hook", Options().comm_hook(std::make_shared<MeanHook>())},
  };
}

}  // namespace semitone::test
