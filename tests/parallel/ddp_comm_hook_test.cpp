// DistributedDataParallel: custom communication hooks, and gradients that are compressed or
// divided on their way.

#include "semitone/autocast/autocast.h"
#include "semitone/comm/init.h"
#include "semitone/core/dtype.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/power_sgd.h"
#include "semitone/parallel/quantized_all_reduce.h"
#include "src/core/dtype_limits.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace semitone::parallel::ddp_comm_hook_test {
namespace {

using test::Batch;
using test::batch_of;
using test::copies;
using test::expect_equal_on_all_ranks;
using test::expect_error;
using test::gradients_of;
using test::Net;
using test::Rank;
using test::run_ranks;
using test::seeded;
using test::sum_of_squares;
using ::testing::HasSubstr;

// Writes a file when the group has received a bucket.
class NotingHook final : public CommHook {
 public:
  explicit NotingHook(std::filesystem::path file) : file_(std::move(file)) {}

  c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                 const comm::Group& group) override {
    at::Tensor gradients = bucket.buffer;
    const auto future = group.all_reduce_async(gradients).future();
    std::ofstream(file_) << "under way";
    return future;
  }

 private:
  const std::filesystem::path file_;
};

TEST(CommHook, GoesOnWhileOtherRanksAreLate) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    const auto file = rank.folder() / ("rank" + std::to_string(rank.number()));
    DistributedDataParallel ddp(
        model, group,
        DistributedDataParallelOptions().comm_hook(std::make_shared<NotingHook>(file)));
    const at::Tensor loss = ddp.forward(batch_of(1, 2).data).sum();
    if (rank.number() == 1) {
      const auto first = rank.folder() / "rank0";
      EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(first); }));
    }
    loss.backward();
  });
}

// A program may call backward() inside the region of its forward.
TEST(CommHook, ComputesAsOutsideInARegion) {
  struct Product final : CommHook {
    c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                   const comm::Group&) override {
      dtypes.push_back(torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type());
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(bucket.buffer);
      return future;
    }
    std::vector<at::ScalarType> dtypes;
  };
  run_ranks(2, [](Rank&) {
    Net model = seeded<Net>(1);
    const auto hook = std::make_shared<Product>();
    DistributedDataParallel ddp(model, comm::init(),
                                DistributedDataParallelOptions().comm_hook(hook));
    const amp::Autocast region(torch::kCPU, torch::kBFloat16);
    ddp.forward(batch_of(1, 2).data).sum().backward();
    EXPECT_THAT(hook->dtypes, ::testing::Each(torch::kFloat));
    EXPECT_FALSE(hook->dtypes.empty());
  });
}

TEST(CommHook, MayGiveAnythingThatFits) {
  struct Zeros final : CommHook {
    c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                   const comm::Group&) override {
      buckets.push_back(bucket.index);
      last = bucket.is_last;
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(torch::zeros_like(bucket.buffer));
      return future;
    }
    std::vector<std::size_t> buckets;
    bool last = false;
  };
  struct Throws final : CommHook {
    c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket&,
                                                   const comm::Group&) override {
      throw std::runtime_error("a hook of no use");
    }
  };
  struct Misfit final : CommHook {
    c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket&,
                                                   const comm::Group&) override {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(torch::zeros({1}));
      return future;
    }
  };
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Batch batch = batch_of(1, 2);
    const auto backward_with = [&](const std::shared_ptr<CommHook>& hook, int passes) {
      Net model = seeded<Net>(1);
      DistributedDataParallel ddp(
          model, group,
          DistributedDataParallelOptions().comm_hook(hook).bucket_cap_mb(0.0002).first_bucket_mb(
              0.0001));
      for (int pass = 0; pass < passes; ++pass)
        sum_of_squares(ddp.forward(batch.data), batch.target).backward();
      return copies(gradients_of(model->parameters()));
    };
    const auto zeros = std::make_shared<Zeros>();
    for (const at::Tensor& gradient : backward_with(zeros, 2)) {
      EXPECT_TRUE(torch::equal(gradient, torch::zeros_like(gradient)));
    }
    // One bucket to determine the order, then small ones.
    EXPECT_THAT(zeros->buckets, ::testing::ElementsAre(0, 0, 1));
    EXPECT_TRUE(zeros->last);
    EXPECT_THAT([&] { backward_with(std::make_shared<Throws>(), 1); },
                ::testing::ThrowsMessage<std::runtime_error>(HasSubstr("a hook of no use")));
    expect_error([&] { backward_with(std::make_shared<Misfit>(), 1); },
                 {"[parallel.comm_hook]", "float64[", "got float32[1]"});
  });
}

// c10d numbers all buckets of a static graph's first step 0.
TEST(CommHook, AStaticGraphsFirstStepHasItsBuckets) {
  struct Noting final : CommHook {
    c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                   const comm::Group& group) override {
      std::int64_t elements = 0;
      for (const at::Tensor& parameter : bucket.parameters) elements += parameter.numel();
      EXPECT_EQ(elements, bucket.buffer.numel());
      buckets.emplace_back(bucket.index, bucket.is_last);
      at::Tensor gradients = bucket.buffer;
      return group.all_reduce_async(gradients, comm::ReduceOp::mean).future();
    }
    std::vector<std::pair<std::size_t, bool>> buckets;
  };
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    // A bucket for each dtype.
    torch::nn::Linear first(3, 4);
    torch::nn::Linear second(4, 2);
    second->to(torch::kDouble);
    torch::nn::Sequential model(
        first, torch::nn::Functional([](const at::Tensor& x) { return x.to(torch::kDouble); }),
        second);
    const at::Tensor input = torch::full({5, 3}, 1.0 + rank.number());
    const auto noting = std::make_shared<Noting>();
    const std::vector<std::shared_ptr<CommHook>> hooks{
        noting, std::make_shared<QuantizedAllReduceHook>(model->parameters()),
        std::make_shared<PowerSGDHook>(model->parameters(),
                                       PowerSGDOptions().start_powerSGD_iter(0))};
    for (const std::shared_ptr<CommHook>& hook : hooks) {
      for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
      DistributedDataParallel ddp(
          model, group, DistributedDataParallelOptions().static_graph(true).comm_hook(hook));
      for (int step = 0; step < 3; ++step) ddp.forward(input).sum().backward();
      for (const at::Tensor& parameter : model->parameters())
        EXPECT_TRUE(parameter.grad().isfinite().all().item<bool>());
      expect_equal_on_all_ranks(group, gradients_of(model->parameters()));
    }
    EXPECT_THAT(noting->buckets, ::testing::ElementsAre(std::pair(0, false), std::pair(1, true),
                                                        std::pair(0, false), std::pair(1, true),
                                                        std::pair(0, false), std::pair(1, true)));
  });
}

// The mean gradient of a one-layer model whose gradients are the input, on every rank.
std::vector<at::Tensor> mean_of_inputs(const comm::Group& group, const at::Tensor& input,
                                       at::ScalarType dtype,
                                       const DistributedDataParallelOptions& options) {
  torch::nn::Linear model(torch::nn::LinearOptions(input.size(0), 1).bias(false));
  model->to(dtype);
  DistributedDataParallel ddp(model, group, options);
  ddp.forward(input.to(dtype).view({1, -1})).sum().backward();
  return {model->weight.grad().view(-1)};
}

TEST(Compression, RoundsToTheDtypeOnly) {
  run_ranks(4, [](Rank& rank) {
    const auto group = comm::init();
    torch::manual_seed(7);
    const at::Tensor inputs = torch::randn({4, 1000}, torch::kDouble);
    const at::Tensor input = inputs[rank.number()];
    const at::Tensor mean = inputs.mean(0);
    const double scale = inputs.abs().max().item<double>();
    for (const auto wire : {torch::kHalf, torch::kBFloat16}) {
      for (const auto dtype : {torch::kFloat, torch::kDouble}) {
        for (const bool delayed : {false, true}) {
          const auto options =
              DistributedDataParallelOptions().compress(wire).delay_allreduce(delayed);
          const at::Tensor got = mean_of_inputs(group, input, dtype, options)[0];
          EXPECT_EQ(got.scalar_type(), dtype);
          // Each rank's value is rounded once, and each of three sums.
          const double most = 4 * dtype_limits(wire).epsilon / 2 * scale;
          EXPECT_LE((got - mean).abs().max().item<double>(), most);
          EXPECT_GT((got - mean).abs().max().item<double>(), 0) << "something was compressed";
          expect_equal_on_all_ranks(group, {got});
        }
      }
    }
    // 16-bit gradients need none.
    const at::Tensor half =
        mean_of_inputs(group, torch::ones({4}), torch::kHalf,
                       DistributedDataParallelOptions().compress(torch::kBFloat16))[0];
    EXPECT_TRUE(test::same_bits(half, torch::ones({4}, torch::kHalf)));
  });
}

TEST(Compression, DividesBeforeAndAfterTheSum) {
  run_ranks(4, [](Rank&) {
    const auto group = comm::init();
    const auto mean = [&](double value, const DistributedDataParallelOptions& options,
                          at::ScalarType dtype = torch::kFloat) {
      return mean_of_inputs(group, torch::full({4}, value), dtype, options)[0][0].item<double>();
    };
    const auto half = DistributedDataParallelOptions().compress(torch::kHalf);
    // The sum of four in fp16, of values divided by 2: 4 * 32752 / 2 is its largest.
    EXPECT_EQ(mean(32752, half), 32752);
    EXPECT_TRUE(std::isinf(mean(40000, half)));
    // fp16's smallest is 2^-24: divided by 2 once, not by 4.
    EXPECT_EQ(mean(std::ldexp(1, -23), half), std::ldexp(1, -23));
    EXPECT_EQ(
        mean(std::ldexp(1, -23), DistributedDataParallelOptions(half).gradient_predivide_factor(4)),
        0);
    EXPECT_EQ(mean(60000, DistributedDataParallelOptions(half).gradient_predivide_factor(4)),
              60000);
    // fp16 gradients summed in fp32.
    const auto wide =
        DistributedDataParallelOptions().allreduce_always_fp32(true).gradient_predivide_factor(1);
    EXPECT_EQ(mean(60000, wide, torch::kHalf), 60000);
    EXPECT_TRUE(std::isinf(
        mean(60000, DistributedDataParallelOptions().gradient_predivide_factor(1), torch::kHalf)));
    EXPECT_TRUE(std::isinf(mean(
        60000, DistributedDataParallelOptions().gradient_predivide_factor(1).delay_allreduce(true),
        torch::kHalf)));
    EXPECT_EQ(mean(60000, DistributedDataParallelOptions(wide).delay_allreduce(true), torch::kHalf),
              60000);
  });
}

}  // namespace
}  // namespace semitone::parallel::ddp_comm_hook_test
