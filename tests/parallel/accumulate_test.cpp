// amp::accumulate with DistributedDataParallel.

#include "semitone/amp/accumulate.h"

#include "semitone/amp/initialize.h"
#include "semitone/comm/init.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::parallel::accumulate_test {
namespace {

using test::copies;
using test::expect_equal_on_all_ranks;
using test::gradients_of;
using test::Rank;
using test::run_ranks;

constexpr std::int64_t kParts = 3;
constexpr std::int64_t kRows = 2;  // of a micro-batch

class CountingHook final : public CommHook {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                 const comm::Group& group) override {
    ++buckets;
    at::Tensor gradients = bucket.buffer;
    return group.all_reduce_async(gradients, comm::ReduceOp::mean).future();
  }
  int buckets = 0;
};

struct Training {
  explicit Training(const char* level, c10::ScalarType dtype = torch::kBFloat16)
      : mixed(amp::initialize(
            net, optimizer, amp::Options(level).dtype(dtype).loss_scale("dynamic").verbosity(0))) {}

  static test::ToyNet make_net() {
    torch::manual_seed(3);
    return test::ToyNet(test::ToyNetOptions{.activation = at::tanh});
  }

  std::vector<at::Tensor> gradients() {
    return copies(gradients_of(mixed.master_params(optimizer)));
  }

  test::ToyNet net = make_net();
  torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.1)};
  amp::MixedPrecision mixed;
};

template <typename Model>
at::Tensor loss_of(Training& training, Model& model, const test::Batch& batch) {
  const auto output = training.mixed.forward(model, batch.data.to(torch::kFloat));
  return torch::mse_loss(output.to(torch::kFloat), batch.target.to(torch::kFloat));
}

TEST(AccumulateOnRanks, EqualsOneLargeBatchInOneProcess) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const test::Batch all = test::batch_of(7, 2 * kParts * kRows);
    Training whole("O0");
    whole.mixed.scale_loss(loss_of(whole, whole.net, all), whole.optimizer).backward();

    Training training("O0");
    const auto hook = std::make_shared<CountingHook>();
    DistributedDataParallel ddp(training.net, group,
                                DistributedDataParallelOptions().comm_hook(hook));
    const at::Tensor mean =
        amp::accumulate(training.mixed, training.optimizer, ddp, kParts, [&](std::int64_t i) {
          const std::int64_t first = (rank.number() * kParts + i) * kRows;
          return loss_of(training, ddp, all.rows(first, first + kRows));
        });
    EXPECT_EQ(hook->buckets, 1);
    EXPECT_TRUE(mean.isfinite().item<bool>());
    EXPECT_TRUE(test::near(training.gradients(), whole.gradients(),
                           test::reduction_tolerance(torch::kFloat, 2 * kParts * kRows)));
    EXPECT_EQ(training.mixed.step(training.optimizer), amp::Step::stepped);
    expect_equal_on_all_ranks(group, training.net->parameters());
  });
}

TEST(AccumulateOnRanks, RanksStayEqualThroughOverflowsAtEveryLevel) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const char* level : {"O1", "O2"}) {
      Training training(level, torch::kHalf);
      DistributedDataParallel ddp(training.net, group);
      int skipped = 0;
      for (int step = 0; step < 6; ++step) {
        const test::Batch batch = test::batch_of(2 * step + rank.number(), kParts * kRows);
        amp::accumulate(training.mixed, training.optimizer, ddp, kParts, [&](std::int64_t i) {
          const at::Tensor loss = loss_of(training, ddp, batch.rows(i * kRows, (i + 1) * kRows));
          return rank.number() == 1 && step % 3 == 1 && i == 0 ? loss * HUGE_VAL : loss;
        });
        if (training.mixed.step(training.optimizer) == amp::Step::skipped) ++skipped;
        training.mixed.zero_grad(training.optimizer);
      }
      EXPECT_EQ(skipped, 2) << level;
      expect_equal_on_all_ranks(group, copies(training.mixed.master_params(training.optimizer)));
      expect_equal_on_all_ranks(group, copies(training.net->parameters()));
    }
  });
}

// The last micro-batch unscales what the others have delayed.
TEST(Accumulate, EndsWhatItsOptionsDelay) {
  const auto train = [](bool delays) {
    torch::manual_seed(2);
    torch::nn::Linear net(3, 2);
    torch::optim::SGD optimizer(net->parameters(), 0.5);
    auto mixed = amp::initialize(
        net, optimizer, amp::Options("O1").dtype(torch::kHalf).loss_scale(64.0).verbosity(0));
    amp::accumulate(
        mixed, optimizer, 3,
        [&](std::int64_t i) {
          return mixed.forward(net, torch::full({4, 3}, static_cast<double>(i + 1))).sum();
        },
        amp::ScaleLossOptions().delay_unscale(delays));
    EXPECT_EQ(mixed.step(optimizer), amp::Step::stepped);
    return test::copies(net->parameters());
  };
  EXPECT_TRUE(test::same_bits(train(true), train(false)));
}

// A weight whose gradient is 1 in the first micro-batch, and 1/512 in the others, on each rank. bf16
// has no number between 1 and 1 + 1/128: added in 16 bits, the sum would remain 1.
TEST(AccumulateOnRanks, LosesNoSmallGradientsOf16Bits) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    constexpr std::int64_t kSmallParts = 16;
    for (const auto& [level, split] :
         {std::pair{"O3", false}, std::pair{"O2", true}, std::pair{"O2", false}}) {
      torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
      optim::FusedSGD optimizer(net->parameters(), optim::FusedSGDOptions(0.1).split_master(split));
      amp::MixedPrecision mixed =
          amp::initialize(net, optimizer, amp::Options(level).loss_scale(128.0).verbosity(0));
      DistributedDataParallel ddp(net, group);
      for (int step = 0; step < 2; ++step) {
        amp::accumulate(mixed, optimizer, ddp, kSmallParts, [&](std::int64_t i) {
          const at::Tensor input = torch::full({1, 1}, i == 0 ? 1.0 : 1.0 / 512);
          return mixed.forward(ddp, input).to(torch::kFloat).sum() * kSmallParts *
                 (2 * rank.number());
        });
        const bool has_masters = level == std::string_view("O2") && !split;
        const at::Tensor grad =
            has_masters ? (*mixed.master_params(optimizer).begin()).grad() : net->weight.grad();
        EXPECT_EQ(grad.scalar_type(), has_masters ? torch::kFloat : torch::kBFloat16) << level;
        EXPECT_EQ(grad.item<float>(), 1.0F + 4.0F / 128) << level;
        EXPECT_EQ(mixed.step(optimizer), amp::Step::stepped);
        mixed.zero_grad(optimizer);
      }
      expect_equal_on_all_ranks(group, net->parameters());
    }
  });
}

// As above, with masters and a loop of the program's own.
TEST(AccumulateOnRanks, LosesNoSmallGradientsOfMastersInNoSync) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    amp::MixedPrecision mixed =
        amp::initialize(net, optimizer, amp::Options("O2").loss_scale(128.0).verbosity(0));
    DistributedDataParallel ddp(net, group);
    for (int i = 0; i < 16; ++i) {
      std::optional<NoSync> local;
      if (i < 15) local.emplace(ddp.no_sync());
      const at::Tensor input = torch::full({1, 1}, i == 0 ? 1.0 : 1.0 / 512);
      const at::Tensor output = mixed.forward(ddp, input).to(torch::kFloat);
      mixed.scale_loss(output.sum() * (2 * rank.number()), optimizer).backward();
    }
    const at::Tensor grad = (*mixed.master_params(optimizer).begin()).grad();
    EXPECT_EQ(grad.item<float>(), 1.0F + 4.0F / 128);
  });
}

}  // namespace
}  // namespace semitone::parallel::accumulate_test
