// ZeroRedundancyOptimizer: saving, loading and resuming, with any number of ranks.

#include "semitone/amp/initialize.h"
#include "semitone/comm/group.h"
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_adagrad.h"
#include "semitone/parallel/zero_redundancy_optimizer.h"
#include "tests/parallel/models.h"
#include "tests/parallel/zero_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/optimizers.h"
#include "tests/support/run_ranks.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace semitone::parallel::zero_test {
namespace {

using test::error_of;
using test::expect_error;
using test::Rank;
using test::run_ranks;
using ::testing::HasSubstr;

TEST(ZeroState, ResumesWithAnyNumberOfRanks) {
  run_ranks(3, [](Rank& rank) {
    const auto three = comm::init();
    const auto two = three.subgroup({0, 1});
    for (const auto& [name, make] : all_kinds()) {
      SCOPED_TRACE(name);
      const std::string folder = rank.folder() / name;
      // The whole run without sharding.
      Net alone = seeded<Net>(1);
      const auto reference = unsharded(make, alone->parameters());
      train(alone, *reference, 0, 8);
      // Its first half on two ranks, saved by the second of them.
      if (rank.number() < 2) {
        Net model = seeded<Net>(1);
        ZeroRedundancyOptimizer optimizer(model->parameters(), make, two);
        train(model, optimizer, 0, 4);
        optimizer.consolidate(1);
        if (rank.number() == 1) {
          torch::save(model, folder + ".model");
          torch::save(optimizer, folder + ".optimizer");
        } else {
          torch::serialize::OutputArchive archive;
          EXPECT_THAT(error_of([&] { optimizer.save(archive); }), HasSubstr("consolidate(0)"));
        }
      }
      three.barrier();
      const auto resume = [&](const std::string& file, auto&& make_optimizer) {
        Net model = seeded<Net>(2);
        torch::load(model, folder + ".model");
        std::unique_ptr<torch::optim::Optimizer> optimizer = make_optimizer(model->parameters());
        torch::load(*optimizer, file);
        train(model, *optimizer, 4, 8);
        expect_same_weights(*model, *alone);
      };
      const auto sharded = [&, &make = make](const std::vector<at::Tensor>& parameters) {
        return std::make_unique<ZeroRedundancyOptimizer>(parameters, make, three);
      };
      // The second half on three, and on one without sharding.
      resume(folder + ".optimizer", sharded);
      resume(folder + ".optimizer", [&, &make = make](const std::vector<at::Tensor>& parameters) {
        return unsharded(make, parameters);
      });
      // And from a file of the optimizer alone.
      Net half = seeded<Net>(1);
      const auto plain = unsharded(make, half->parameters());
      train(half, *plain, 0, 4);
      const std::string file = folder + ".plain" + std::to_string(rank.number());
      torch::save(*plain, file);
      resume(file, sharded);
    }
  });
}

TEST(ZeroState, OfMasterWeightsResumesWithAnyNumberOfRanks) {
  run_ranks(3, [](Rank& rank) {
    const auto three = comm::init();
    const auto two = three.subgroup({0, 1});
    const auto fp32_net = [](std::uint64_t seed) {
      Net model = seeded<Net>(seed);
      model->to(torch::kFloat);
      return model;
    };
    const auto options =
        amp::Options(amp::OptLevel::O2).dtype(torch::kBFloat16).loss_scale(8.).verbosity(0);
    const auto train = [](Net& model, torch::optim::Optimizer& optimizer,
                          amp::MixedPrecision& mixed, int begin, int end) {
      for (int step = begin; step < end; ++step) {
        const Batch batch = batch_of(100 + step, 8);
        mixed.zero_grad(optimizer);
        const at::Tensor output = mixed.forward(model, batch.data.to(torch::kFloat));
        mixed.scale_loss(sum_of_squares(output, batch.target.to(torch::kFloat)), optimizer)
            .backward();
        EXPECT_EQ(mixed.step(optimizer), amp::Step::stepped);
      }
    };
    Net alone = fp32_net(1);
    const auto reference = unsharded(adam(), alone->parameters());
    auto mixed = amp::initialize(alone, *reference, options);
    train(alone, *reference, mixed, 0, 8);

    const std::string folder = rank.folder();
    if (rank.number() < 2) {
      Net model = fp32_net(1);
      ZeroRedundancyOptimizer optimizer(model->parameters(), adam(), two);
      auto half = amp::initialize(model, optimizer, options);
      train(model, optimizer, half, 0, 4);
      optimizer.consolidate();
      if (rank.number() == 0) {
        half.save_model(model, folder + "/model");
        torch::serialize::OutputArchive archive;
        half.save(archive);
        archive.save_to(folder + "/mixed");
        torch::save(optimizer, folder + "/optimizer");
      }
    }
    three.barrier();
    Net model = fp32_net(2);
    ZeroRedundancyOptimizer optimizer(model->parameters(), adam(), three);
    auto resumed = amp::initialize(model, optimizer, options);
    resumed.load_model(model, folder + "/model");
    torch::load(optimizer, folder + "/optimizer");
    torch::serialize::InputArchive archive;
    archive.load_from(folder + "/mixed");
    resumed.load(archive);
    train(model, optimizer, resumed, 4, 8);
    expect_same_weights(*model, *alone);
  });
}

TEST(ZeroState, HasTheOptionsOfItsTime) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    ZeroRedundancyOptimizer optimizer(model->parameters(), adam(), group);
    train(model, optimizer, 0, 2);
    optimizer.param_groups()[0].options().set_lr(0.125);
    optimizer.consolidate();
    const std::string file = rank.folder() / "optimizer";
    if (rank.number() == 0) torch::save(optimizer, file);
    group.barrier();
    optimizer.param_groups()[0].options().set_lr(0.25);
    torch::load(optimizer, file);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.125);
    // A step invalidates the consolidated state.
    optimizer.consolidate();
    optimizer.step();
    torch::serialize::OutputArchive archive;
    expect_error([&] { optimizer.save(archive); },
                 {"[parallel.zero_redundancy_optimizer.save]", "consolidate"});
    expect_error([&] { optimizer.consolidate(2); }, {"a rank from 0 to 1, got 2"});
  });
}

// LibTorch's load() alone leaves such a parameter without its state.
class ZeroStateOfTiedWeights : public ::testing::TestWithParam<std::size_t> {};

TEST_P(ZeroStateOfTiedWeights, Resumes) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Factory make = all_kinds().at(GetParam()).make;
    const auto parameters = [] {
      at::Tensor weight = torch::ones({3, 4}).requires_grad_();
      return std::vector<at::Tensor>{weight, torch::ones({2}).requires_grad_(), weight};
    };
    const auto step = [](torch::optim::Optimizer& optimizer) {
      for (const at::Tensor& parameter : optimizer.param_groups()[0].params())
        parameter.mutable_grad() = torch::full_like(parameter, 0.5);
      optimizer.step();
    };
    const auto whole = parameters();
    const auto alone = unsharded(make, whole);
    for (int i = 0; i < 4; ++i) step(*alone);

    const auto half = parameters();
    ZeroRedundancyOptimizer saved(half, make, group);
    for (int i = 0; i < 2; ++i) step(saved);
    std::stringstream file;
    for (const int rank : {0, 1}) {
      saved.consolidate(rank);
      if (group.rank() == rank) torch::save(saved, file);
    }
    const auto rest = parameters();
    ZeroRedundancyOptimizer resumed(rest, make, group);
    torch::load(resumed, file);
    {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < rest.size(); ++i) rest[i].copy_(half[i]);
    }
    for (int i = 0; i < 2; ++i) step(resumed);
    for (std::size_t i = 0; i < rest.size(); ++i) EXPECT_TRUE(torch::equal(rest[i], whole[i]));
  });
}
// LibTorch's SGD with momentum, and FusedAdam.
INSTANTIATE_TEST_SUITE_P(ZeroState, ZeroStateOfTiedWeights, ::testing::Values(0U, 3U));

// LibTorch's Adagrad makes its state in the constructor, and its step needs it.
TEST(ZeroState, OfAdagradIsMadeForParametersThatTheFileLacks) {
  at::Tensor head = torch::ones({2}).requires_grad_();
  at::Tensor body = torch::ones({3}).requires_grad_();
  head.mutable_grad() = torch::ones({2});
  optim::FusedAdagrad fused({head, body}, optim::FusedAdagradOptions(0.1));
  fused.step();
  std::stringstream file;
  torch::save(fused, file);
  run_ranks(2, [&](Rank&) {
    const auto group = comm::init();
    ZeroRedundancyOptimizer optimizer(
        std::vector<at::Tensor>{head, body},
        factory<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1)), group);
    torch::load(optimizer, file);
    body.mutable_grad() = torch::ones({3});
    optimizer.step();
    EXPECT_TRUE(torch::allclose(body, torch::full({3}, 0.9)));
  });
}

TEST(ZeroState, OfAnotherOptimizerIsRefused) {
  Net model = seeded<Net>(1);
  ZeroRedundancyOptimizer optimizer(model->parameters(), adam(), comm::Group());
  train(model, optimizer, 0, 2);
  const auto elements = elements_of_adam_state(optimizer);
  torch::optim::SGD other(model->first->parameters(), 0.1);
  std::stringstream file;
  torch::save(other, file);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  EXPECT_THAT(test::message_of<FileError>([&] { optimizer.load(archive); }),
              HasSubstr("[parallel.zero_redundancy_optimizer.load]"));
  EXPECT_EQ(elements_of_adam_state(optimizer), elements);
}

// Its state would be lost without a word.
TEST(ZeroState, OfAnOptimizerWithoutSaveIsRefusedWhereItIsSaved) {
  run_ranks(2, [](Rank&) {
    Net model = seeded<Net>(1);
    ZeroRedundancyOptimizer optimizer(
        model->parameters(),
        [](const ParamGroups& groups) {
          return std::make_unique<test::OwnOptimizer>(groups.at(0).params());
        },
        comm::init());
    back_propagate(model, 0);
    optimizer.step();
    expect_error([&] { optimizer.consolidate(); },
                 {"[parallel.zero_redundancy_optimizer.consolidate] expected an optimizer that "
                  "saves its state, got one that saves nothing"});
    torch::serialize::OutputArchive archive;
    expect_error([&] { optimizer.save_share(archive); }, {"save_share]", "override save()"});
    // Training goes on.
    const auto before = test::copies(model->parameters());
    optimizer.step();
    EXPECT_FALSE(test::same_bits(test::copies(model->parameters()), before));
  });
}

// One of the two parameters would begin with a fresh state, without a word.
TEST(ZeroState, OfTiedWeightsThatAreNoLongerTiedIsRefused) {
  const auto parameter = [] {
    at::Tensor made = torch::ones({3}).requires_grad_();
    made.mutable_grad() = torch::ones({3});
    return made;
  };
  const auto refusal = [](torch::optim::Optimizer& saved, std::vector<at::Tensor> parameters) {
    saved.step();
    std::stringstream file;
    torch::save(saved, file);
    ZeroRedundancyOptimizer optimizer(std::move(parameters), adam(), comm::Group());
    optimizer.step();
    const auto elements = elements_of_adam_state(optimizer);
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    const std::string message = test::message_of<FileError>([&] { optimizer.load(archive); });
    EXPECT_EQ(elements_of_adam_state(optimizer), elements);
    return message;
  };
  const at::Tensor tied = parameter();
  torch::optim::Adam twice(std::vector<at::Tensor>{tied, tied}, 0.1);
  EXPECT_THAT(refusal(twice, {parameter(), parameter()}),
              HasSubstr("one of two parameters, which were one tensor in the saved run"));
  at::Tensor wide = torch::ones({5}).requires_grad_();
  wide.mutable_grad() = torch::ones({5});
  torch::optim::Adam other_shape(std::vector<at::Tensor>{wide}, 0.1);
  EXPECT_THAT(
      refusal(other_shape, {parameter()}),
      HasSubstr("the state of a parameter of shape [3] in the optimizer, got one of shape [5]"));
}

// The peak resident memory of this process, in MiB.
double peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    double kib = 0;
    if (word == "VmHWM:" && status >> kib) return kib / 1024;
  }
  return std::nan("");
}

TEST(ZeroState, GoesToTheRankThatSavesItAndToNoOther) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    // 32 MiB, and twice as much state on rank 0.
    const at::Tensor parameter = torch::zeros({8 << 20}).requires_grad_();
    ZeroRedundancyOptimizer optimizer({parameter}, adam(), group);
    parameter.mutable_grad() = torch::ones_like(parameter);
    optimizer.step();
    const double before = peak_memory();
    optimizer.consolidate(1);
    const double grown = peak_memory() - before;
    if (rank.number() == 2) {
      EXPECT_LT(grown, 32);
    }
    if (rank.number() == 1) {
      EXPECT_GT(grown, 32);  // so that the measure is one
      EXPECT_EQ(elements_of_adam_state(optimizer), 0);
    }
  });
}

}  // namespace
}  // namespace semitone::parallel::zero_test
