// Captured steps of several ranks: refused where a device would replay them, and steps like any
// other where it would not.

#include "semitone/amp/captured_step.h"

#include "semitone/amp/initialize.h"
#include "semitone/comm/init.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/sync_batch_norm.h"
#include "src/amp/step_graph.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace semitone::parallel::captured_step_test {
namespace {

bool& graphs_exist() {
  static bool value = false;
  return value;
}

// A capture and each replay call the captured work.
struct CallingGraph : amp::StepGraph {
  void warm_up(const std::function<void()>& warm) override { warm(); }
  void capture(const std::function<void()>& captured) override {
    captured();
    work = captured;
  }
  void replay() override { work(); }
  void reset() override { work = nullptr; }
  std::function<void()> work;
};

}  // namespace
}  // namespace semitone::parallel::captured_step_test

namespace semitone::amp {

// Replaces the library's function.
std::unique_ptr<StepGraph> make_step_graph(c10::Device /*device*/) {
  if (!parallel::captured_step_test::graphs_exist()) return nullptr;
  return std::make_unique<parallel::captured_step_test::CallingGraph>();
}

}  // namespace semitone::amp

namespace semitone::parallel::captured_step_test {
namespace {

using test::Rank;
using test::run_ranks;

// A linear layer and a batch norm over all ranks.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const comm::Group& group)
      : norm(register_module("norm", SyncBatchNorm(nn::FusedBatchNormOptions(5), group))) {}
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)); }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 5))};
  SyncBatchNorm norm;
};
TORCH_MODULE(Net);

struct Training {
  explicit Training(const comm::Group& group)
      : net(seeded(group)),
        optimizer(net->parameters(), optim::FusedSGDOptions(0.1)),
        mixed(amp::initialize(net, optimizer,
                              amp::Options("O1").dtype(torch::kBFloat16).verbosity(0))),
        ddp(net, group) {}

  static Net seeded(const comm::Group& group) {
    torch::manual_seed(1);
    return Net(group);
  }
  static at::Tensor input(int rank, int step) {
    const int seed = 100 + 10 * step + rank;
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    return torch::randn({6, 4});
  }
  // @param forward  of the model
  amp::CapturedStep captured(std::function<at::Tensor(const at::Tensor&)> forward) {
    return {mixed, optimizer, [forward = std::move(forward)](const std::vector<at::Tensor>& batch) {
              return forward(batch[0]).pow(3).mean();
            }};
  }

  Net net;
  optim::FusedSGD optimizer;
  amp::MixedPrecision mixed;
  DistributedDataParallel<Net> ddp;
};

TEST(CapturedStepsOfRanks, AreRefusedWhereTheyWouldBeReplayed) {
  run_ranks(2, [](Rank& rank) {
    graphs_exist() = true;
    const auto group = comm::init();
    Training training(group);
    const std::vector<at::Tensor> batch{Training::input(rank.number(), 0)};
    const auto before = test::copies(training.net->parameters());
    auto ddp = training.captured(
        [&](const at::Tensor& x) { return training.mixed.forward(training.ddp, x); });
    test::expect_error([&] { ddp.run(batch); },
                       {"[parallel.ddp]", "amp::CapturedStep", "train without CapturedStep"});
    auto layer = training.captured(
        [&](const at::Tensor& x) { return training.mixed.forward(training.net, x); });
    test::expect_error([&] { layer.run(batch); },
                       {"[parallel.sync_batch_norm]", "amp::CapturedStep", "train without"});
    test::expect_bitwise_equal(test::copies(training.net->parameters()), before);
    // Nothing has been sent: steps by hand still work, on all ranks.
    const at::Tensor loss = training.mixed.forward(training.ddp, batch[0]).pow(3).mean();
    training.mixed.scale_loss(loss, training.optimizer).backward();
    EXPECT_EQ(training.mixed.step(training.optimizer), amp::Step::stepped);
  });
}

TEST(CapturedStepsOfRanks, OfOneRankAreReplayed) {
  run_ranks(1, [](Rank&) {
    graphs_exist() = true;
    Training training(comm::init());
    auto step = training.captured(
        [&](const at::Tensor& x) { return training.mixed.forward(training.ddp, x); });
    for (int i = 0; i < 5; ++i) step.run({Training::input(0, i)});
    EXPECT_TRUE(step.is_captured());
  });
}

TEST(CapturedStepsOfRanks, RunOperatorByOperatorWithoutGraphs) {
  run_ranks(2, [](Rank& rank) {
    graphs_exist() = false;
    const auto group = comm::init();
    Training training(group), by_hand(group);
    auto step = training.captured(
        [&](const at::Tensor& x) { return training.mixed.forward(training.ddp, x); });
    for (int i = 0; i < 5; ++i) {
      const at::Tensor input = Training::input(rank.number(), i);
      step.run({input});
      by_hand.optimizer.zero_grad();
      const at::Tensor loss = by_hand.mixed.forward(by_hand.ddp, input).pow(3).mean();
      by_hand.mixed.scale_loss(loss, by_hand.optimizer).backward();
      by_hand.mixed.step(by_hand.optimizer);
    }
    EXPECT_FALSE(step.is_captured());
    test::expect_bitwise_equal(test::copies(training.net->parameters()),
                               test::copies(by_hand.net->parameters()));
  });
}

}  // namespace
}  // namespace semitone::parallel::captured_step_test
