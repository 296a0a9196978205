// Master weights in data-parallel training: all ranks train the exact weights of rank 0.

#include "semitone/amp/initialize.h"
#include "semitone/comm/init.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/post_local_sgd.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::parallel::master_weights_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_equal_on_all_ranks;
using test::Rank;
using test::run_ranks;

// A frozen layer as well, which has no master.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("first", first);
    register_module("frozen", frozen);
    register_module("second", second);
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return second(torch::tanh(frozen(torch::tanh(first(x)))));
  }
  torch::nn::Linear first{6, 16}, frozen{16, 16}, second{16, 3};
};
TORCH_MODULE(Net);

enum class Kind { whole, split, torchs };

struct Training {
  Training(std::uint64_t seed, Kind kind) {
    torch::manual_seed(seed);
    net = Net();
    initial = test::copies(net->parameters());
    if (kind == Kind::torchs) {
      optimizer = std::make_unique<torch::optim::Adam>(net->parameters(), 1e-3);
    } else {
      optimizer = std::make_unique<optim::FusedAdam>(
          net->parameters(), optim::FusedAdamOptions(1e-3).split_master(kind == Kind::split));
    }
    mixed.emplace(amp::initialize(
        net, *optimizer,
        amp::Options(amp::OptLevel::O2).dtype(torch::kBFloat16).loss_scale(1.0).verbosity(0)));
  }

  template <typename Model>
  void step(Model& model, std::uint64_t seed) {
    torch::manual_seed(seed);
    const at::Tensor data = torch::randn({8, 6});
    const at::Tensor target = torch::randn({8, 3});
    optimizer->zero_grad();
    mixed->scale_loss(torch::mse_loss(mixed->forward(model, data), target), *optimizer).backward();
    EXPECT_EQ(mixed->step(*optimizer), amp::Step::stepped);
  }

  // The masters, assembled if they are split.
  std::vector<at::Tensor> exact() {
    const auto fp32 = mixed->fp32_weights(net);
    return test::copies(net->parameters());
  }

  Net net{nullptr};
  std::vector<at::Tensor> initial;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::optional<amp::MixedPrecision> mixed;
};

// The frozen layer has no master: it is the rounded one of rank 0.
std::vector<at::Tensor> with_rounded_frozen(const Net& net, std::vector<at::Tensor> values) {
  const auto parameters = net->parameters();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!parameters[i].requires_grad())
      values[i] = values[i].to(torch::kBFloat16).to(torch::kFloat);
  }
  return values;
}

// Each rank draws different weights: rank 0's count, as they were before the cast. With the same
// batch on every rank the result is that of one process.
TEST(MasterWeightsOfReplicas, AreRankZerosExactOnesAndStayEqual) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    at::set_num_threads(1);
    for (const Kind kind : {Kind::whole, Kind::split, Kind::torchs}) {
      SCOPED_TRACE(static_cast<int>(kind));
      Training alone(1, kind);
      Training shared(1 + static_cast<std::uint64_t>(rank.number()), kind);
      DistributedDataParallel ddp(shared.net, group);
      expect_bitwise_equal(shared.exact(), with_rounded_frozen(alone.net, alone.initial));
      for (std::uint64_t step = 0; step < 10; ++step) {
        alone.step(alone.net, 100 + step);
        shared.step(ddp, 100 + step);
      }
      expect_bitwise_equal(shared.exact(), alone.exact());

      // Other batches on each rank: all still take the same steps.
      for (std::uint64_t step = 0; step < 20; ++step) {
        shared.step(ddp, 1000 * step + static_cast<std::uint64_t>(rank.number()));
        expect_equal_on_all_ranks(group, shared.exact());
      }
    }
  });
}

// initialize, load, then DistributedDataParallel: the order of the README.
TEST(MasterWeightsOfReplicas, ThatWereLoadedBeforeResumeBitForBit) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    at::set_num_threads(1);
    const auto mine = [&](std::uint64_t step) {
      return 1000 * step + static_cast<std::uint64_t>(rank.number());
    };
    for (const Kind kind : {Kind::whole, Kind::split, Kind::torchs}) {
      SCOPED_TRACE(static_cast<int>(kind));
      Training first(1, kind);
      DistributedDataParallel first_ddp(first.net, group);
      for (std::uint64_t step = 0; step < 5; ++step) first.step(first_ddp, mine(step));
      std::stringstream model;
      std::stringstream optimizer;
      torch::serialize::OutputArchive archive;
      {
        const auto fp32 = first.mixed->fp32_weights(first.net);
        torch::save(first.net, model);
      }
      torch::save(*first.optimizer, optimizer);
      first.mixed->save(archive);
      std::stringstream mixed;
      archive.save_to(mixed);

      Training second(7 + static_cast<std::uint64_t>(rank.number()), kind);
      {
        const auto fp32 = second.mixed->fp32_weights(second.net);
        torch::load(second.net, model);
      }
      torch::load(*second.optimizer, optimizer);
      torch::serialize::InputArchive loaded;
      loaded.load_from(mixed);
      second.mixed->load(loaded);
      expect_bitwise_equal(second.exact(), first.exact());
      DistributedDataParallel second_ddp(second.net, group);
      expect_bitwise_equal(second.exact(), first.exact());
      for (std::uint64_t step = 5; step < 10; ++step) {
        first.step(first_ddp, mine(step));
        second.step(second_ddp, mine(step));
      }
      expect_bitwise_equal(second.exact(), first.exact());
    }
  });
}

// Programs without DistributedDataParallel: ranks that were given equal weights continue with equal
// ones.
TEST(MasterWeightsOfReplicas, FollowCollectivesOfTheModelsParameters) {
  using Send = std::function<void(const comm::Group&, std::vector<at::Tensor>)>;
  const std::vector<Send> all{
      [](const comm::Group& group, const std::vector<at::Tensor>& parameters) {
        group.broadcast(parameters);
      },
      [](const comm::Group& group, std::vector<at::Tensor> parameters) {
        for (at::Tensor& parameter : parameters) group.broadcast(parameter);
      },
      [](const comm::Group& group, std::vector<at::Tensor> parameters) {
        for (at::Tensor& parameter : parameters) group.all_reduce(parameter, comm::ReduceOp::mean);
      },
  };
  run_ranks(2, [&](Rank& rank) {
    const auto group = comm::init();
    at::set_num_threads(1);
    for (const Kind kind : {Kind::whole, Kind::split, Kind::torchs}) {
      for (const Send& send : all) {
        SCOPED_TRACE(static_cast<int>(kind));
        Training training(1 + static_cast<std::uint64_t>(rank.number()), kind);
        send(group, training.net->parameters());
        expect_equal_on_all_ranks(group, training.exact());
        for (std::uint64_t step = 0; step < 3; ++step) training.step(training.net, 100 + step);
        expect_equal_on_all_ranks(group, training.exact());
      }
    }
  });
}

// The exact weights of the ranks that had input last, on all ranks: the next epoch starts equally.
TEST(MasterWeightsOfReplicas, AreTheSameAfterUnevenInputs) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    at::set_num_threads(1);
    for (const Kind kind : {Kind::whole, Kind::split}) {
      SCOPED_TRACE(static_cast<int>(kind));
      Training training(1, kind);
      DistributedDataParallel ddp(training.net, group);
      const std::uint64_t batches = rank.number() == 0 ? 3 : 8;
      ddp.join([&] {
        for (std::uint64_t step = 0; step < batches; ++step)
          training.step(ddp, 1000 * step + static_cast<std::uint64_t>(rank.number()));
      });
      expect_equal_on_all_ranks(group, training.exact());
    }
  });
}

// After a step the gradients are gone, and the averaged weights are the masters.
TEST(MasterWeights, AreAveragedPeriodically) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const Kind kind : {Kind::whole, Kind::split, Kind::torchs}) {
      SCOPED_TRACE(static_cast<int>(kind));
      Training training(3, kind);
      PeriodicModelAverager averager(group, 1);
      training.step(training.net, rank.number() == 0 ? 10 : 11);
      const auto exact = [&] {
        const auto scope = training.mixed->fp32_weights(training.net);
        return test::copies(training.net->parameters());
      };
      const auto before = exact();
      {
        const auto scope = training.mixed->fp32_weights(training.net);
        EXPECT_TRUE(averager.average_parameters(training.net->parameters()));
      }
      const auto after = exact();
      bool any_differed = false;
      for (std::size_t i = 0; i < before.size(); ++i) {
        const auto of_ranks = group.all_gather(before[i]);
        any_differed |= !torch::equal(of_ranks[0], of_ranks[1]);
        expect_bitwise_equal(after[i], (of_ranks[0] + of_ranks[1]) / 2);
      }
      EXPECT_TRUE(any_differed);
    }
  });
}

}  // namespace
}  // namespace semitone::parallel::master_weights_test
