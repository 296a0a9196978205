#include "semitone/parallel/zero_redundancy_optimizer.h"

#include "semitone/amp/initialize.h"
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/scaling/grad_scaler.h"
#include "src/comm/process_group.h"
#include "tests/parallel/models.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace semitone::parallel {
namespace {

using test::Batch;
using test::batch_of;
using test::error_of;
using test::expect_error;
using test::Net;
using test::Rank;
using test::run_ranks;
using test::seeded;
using test::sum_of_squares;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Factory = ZeroRedundancyOptimizer::Factory;
using ParamGroups = ZeroRedundancyOptimizer::ParamGroups;

template <typename Optimizer, typename Options>
Factory factory(const Options& options) {
  return [options](ParamGroups groups) {
    return std::make_unique<Optimizer>(std::move(groups), options);
  };
}

struct Kind {
  std::string name;
  Factory make;
};

std::vector<Kind> all_kinds() {
  namespace torch_optim = torch::optim;
  return {
      {"SGD",
       factory<torch_optim::SGD>(torch_optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01))},
      {"Adam", factory<torch_optim::Adam>(torch_optim::AdamOptions(0.01).amsgrad(true))},
      {"AdamW", factory<torch_optim::AdamW>(torch_optim::AdamWOptions(0.01).weight_decay(0.1))},
      {"FusedAdam", factory<optim::FusedAdam>(optim::FusedAdamOptions(0.01).weight_decay(0.1))},
      {"FusedAdam, state in bf16",
       factory<optim::FusedAdam>(optim::FusedAdamOptions(0.01).bf16_state(true))},
  };
}

Factory adam() {
  return all_kinds().at(1).make;
}

std::unique_ptr<torch::optim::Optimizer> unsharded(const Factory& make,
                                                   const std::vector<at::Tensor>& parameters) {
  return make({torch::optim::OptimizerParamGroup(parameters)});
}

// The gradients of a step, the same on every rank.
void back_propagate(Net& model, int step) {
  const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 8);
  sum_of_squares(model->forward(batch.data), batch.target).backward();
}

// Steps [begin, end) of a run, with a decreasing learning rate.
void train(Net& model, torch::optim::Optimizer& optimizer, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(0.01 / (1 + step));
    optimizer.zero_grad();
    back_propagate(model, step);
    optimizer.step();
  }
}

void expect_same_weights(const torch::nn::Module& got, const torch::nn::Module& want) {
  ASSERT_EQ(got.parameters().size(), want.parameters().size());
  for (std::size_t i = 0; i < want.parameters().size(); ++i) {
    EXPECT_TRUE(test::same_bits(got.parameters()[i].detach(), want.parameters()[i].detach()))
        << "parameter " << i;
  }
}

std::int64_t elements_of_adam_state(const torch::optim::Optimizer& optimizer) {
  std::int64_t elements = 0;
  for (const auto& [parameter, state] : optimizer.state()) {
    const auto& adam_state = static_cast<const torch::optim::AdamParamState&>(*state);
    for (const at::Tensor& tensor :
         {adam_state.exp_avg(), adam_state.exp_avg_sq(), adam_state.max_exp_avg_sq()})
      elements += tensor.defined() ? tensor.numel() : 0;
  }
  return elements;
}

void expect_training_as_unsharded(int ranks) {
  run_ranks(ranks, [](Rank&) {
    const auto group = comm::init();
    for (const auto& [name, make] : all_kinds()) {
      SCOPED_TRACE(name);
      Net alone = seeded<Net>(1);
      const auto reference = unsharded(make, alone->parameters());
      train(alone, *reference, 0, 8);
      Net model = seeded<Net>(1);
      ZeroRedundancyOptimizer optimizer(model->parameters(), make, group);
      train(model, optimizer, 0, 8);
      expect_same_weights(*model, *alone);
      EXPECT_LT(optimizer.state().size(), reference->state().size());
    }
  });
}

TEST(Zero, TrainsAsTheOptimizerAloneWithTwoRanks) {
  expect_training_as_unsharded(2);
}
TEST(Zero, TrainsAsTheOptimizerAloneWithThreeRanks) {
  expect_training_as_unsharded(3);
}

TEST(Zero, IsTheOptimizerAloneInASingleProcess) {
  for (const auto& [name, make] : all_kinds()) {
    SCOPED_TRACE(name);
    Net alone = seeded<Net>(1);
    Net model = seeded<Net>(1);
    const auto reference = unsharded(make, alone->parameters());
    ZeroRedundancyOptimizer optimizer(model->parameters(), make, comm::Group());
    train(alone, *reference, 0, 4);
    train(model, optimizer, 0, 4);
    std::stringstream file;
    torch::save(optimizer, file);  // no consolidate() needed
    Net resumed = seeded<Net>(1);
    for (std::size_t i = 0; i < model->parameters().size(); ++i)
      resumed->parameters()[i].data().copy_(model->parameters()[i]);
    const auto plain = unsharded(make, resumed->parameters());
    torch::load(*plain, file);
    train(alone, *reference, 4, 8);
    train(model, optimizer, 4, 8);
    train(resumed, *plain, 4, 8);
    expect_same_weights(*model, *alone);
    expect_same_weights(*resumed, *alone);
  }
}

TEST(Zero, SendsEachShareInOneMessage) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init("env://", comm::InitOptions().check(comm::CheckLevel::calls));
    Net model = seeded<Net>(1);
    ZeroRedundancyOptimizer optimizer(model->parameters(), adam(), group);
    back_propagate(model, 0);
    const auto before = group.impl()->watch->calls();
    optimizer.step();
    EXPECT_EQ(group.impl()->watch->calls() - before, 2u);
  });
}

TEST(Zero, KeepsTheStateOfItsShareOnly) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    std::vector<at::Tensor> parameters;
    for (const std::int64_t size : {2, 7, 5, 7, 1, 0, 4})
      parameters.push_back(torch::ones({size}, torch::requires_grad()));
    ZeroRedundancyOptimizer optimizer(parameters, adam(), group);
    // 7 -> 0, 7 -> 1, 5 -> 2, 4 -> 2, 2 -> 0, 1 -> 1, 0 -> 1
    EXPECT_EQ(optimizer.owners(), (std::vector<std::vector<int>>{{0, 0, 2, 1, 1, 1, 2}}));
    for (const at::Tensor& parameter : parameters)
      parameter.mutable_grad() = torch::ones_like(parameter);
    optimizer.step();
    const std::vector<std::int64_t> elements = {9, 8, 9};
    EXPECT_EQ(elements_of_adam_state(optimizer),
              3 * elements[static_cast<std::size_t>(rank.number())]);
    // Assignments continue from group to group.
    optimizer.add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{
        torch::ones({3}, torch::requires_grad()), torch::ones({4}, torch::requires_grad())}));
    EXPECT_EQ(optimizer.owners()[1], (std::vector<int>{0, 1}));
  });
}

// Of a class that LibTorch 2.15's own add_param_group does not know.
TEST(Zero, TakesNewGroupsWithOptionsOfTheirOwn) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const at::Tensor first = torch::ones({3}).requires_grad_();
    const at::Tensor second = torch::ones({2}).requires_grad_();
    const auto make = factory<optim::FusedAdam>(optim::FusedAdamOptions(0.01).weight_decay(0.1));
    ZeroRedundancyOptimizer optimizer({first}, make, group);
    optimizer.add_param_group(torch::optim::OptimizerParamGroup(
        {second}, std::make_unique<optim::FusedAdamOptions>(0.5)));
    const auto& options =
        static_cast<const optim::FusedAdamOptions&>(optimizer.param_groups()[1].options());
    EXPECT_EQ(options.lr(), 0.5);
    EXPECT_EQ(options.weight_decay(), 0);
    first.mutable_grad() = torch::ones({3});
    second.mutable_grad() = torch::ones({2});
    optimizer.step();
    EXPECT_TRUE(torch::allclose(second, torch::full({2}, 0.5)));
  });
}

// LibTorch 2.15 treats an option with its class's default value as not set.
TEST(Zero, SavesOptionsThatAreTheDefaultsOfTheirClass) {
  run_ranks(1, [](Rank&) {
    const at::Tensor weight = torch::ones({3}).requires_grad_();
    const auto make = factory<torch::optim::Adam>(torch::optim::AdamOptions(0.01));
    ZeroRedundancyOptimizer optimizer({weight}, make, comm::init());
    optimizer.param_groups()[0].options().set_lr(torch::optim::AdamOptions().lr());
    std::stringstream file;
    torch::save(optimizer, file);
    torch::optim::Adam alone(std::vector<at::Tensor>{weight}, torch::optim::AdamOptions(0.5));
    torch::load(alone, file);
    EXPECT_EQ(alone.param_groups()[0].options().get_lr(), torch::optim::AdamOptions().lr());
  });
}

TEST(Zero, TakesGroupsWithOptionsAndNewOnesLater) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const auto set_up = [](Net& model, auto&& make_optimizer) {
      using torch::optim::OptimizerParamGroup;
      auto options = std::make_unique<torch::optim::AdamOptions>(0.5);
      options->weight_decay(0.25);
      ParamGroups groups;
      groups.emplace_back(model->second->parameters(), std::move(options));
      auto optimizer = make_optimizer(std::move(groups));
      const auto step = [&](int number) {
        optimizer->zero_grad();
        back_propagate(model, number);
        optimizer->step();
      };
      step(0);
      step(1);
      optimizer->add_param_group(OptimizerParamGroup(model->first->parameters()));
      step(2);
      step(3);
    };
    Net alone = seeded<Net>(1);
    set_up(alone, [&](ParamGroups groups) { return adam()(std::move(groups)); });
    Net model = seeded<Net>(1);
    set_up(model, [&](ParamGroups groups) {
      return std::make_unique<ZeroRedundancyOptimizer>(std::move(groups), adam(), group);
    });
    expect_same_weights(*model, *alone);
  });
}

TEST(Zero, EvaluatesAClosureFirst) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Net alone = seeded<Net>(1);
    const auto reference = unsharded(adam(), alone->parameters());
    train(alone, *reference, 0, 1);
    Net model = seeded<Net>(1);
    ZeroRedundancyOptimizer optimizer(model->parameters(), adam(), group);
    optimizer.param_groups()[0].options().set_lr(0.01);
    const torch::NoGradGuard no_grad;
    const at::Tensor loss = optimizer.step([&] {
      optimizer.zero_grad();
      back_propagate(model, 0);
      return torch::tensor(3.);
    });
    EXPECT_EQ(loss.item<double>(), 3);
    expect_same_weights(*model, *alone);
  });
}

TEST(Zero, SendsParametersOfAnyLayoutOnce) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto make_parameters = [] {
      const auto leaf = [](const at::Tensor& tensor) { return tensor.detach().requires_grad_(); };
      std::vector<at::Tensor> parameters = {
          leaf(torch::ones({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast)),
          leaf(torch::ones({5, 3}).t()), leaf(torch::ones({4, 6}).slice(1, 0, 3)),
          leaf(torch::ones({3}, torch::kDouble)), leaf(torch::ones({}))};
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor& one = parameters[i];
        one.mutable_grad() =
            torch::arange(one.numel(), one.options()).reshape(one.sizes()) + static_cast<double>(i);
      }
      parameters.push_back(parameters[0]);  // twice
      return parameters;
    };
    const auto fused = all_kinds().at(3).make;  // steps what is there twice once
    const auto alone = make_parameters();
    const auto parameters = make_parameters();
    unsharded(fused, alone)->step();
    ZeroRedundancyOptimizer optimizer(parameters, fused, group);
    EXPECT_EQ(optimizer.owners()[0].back(), optimizer.owners()[0].front());
    const auto version = parameters[3]._version();
    optimizer.step();
    EXPECT_GT(parameters[3]._version(), version) << "on rank " << rank.number();
    for (std::size_t i = 0; i < alone.size(); ++i)
      EXPECT_TRUE(test::same_bits(parameters[i].detach(), alone[i].detach())) << i;
  });
}

// Model and optimizer on rank 0's share of the data, and so on, at an opt level.
void train_at(amp::OptLevel level, Rank& rank, const comm::Group& group, Net& model,
              torch::optim::Optimizer& optimizer) {
  auto mixed = amp::initialize(
      model, optimizer, amp::Options(level).dtype(torch::kBFloat16).loss_scale(128.).verbosity(0));
  DistributedDataParallel ddp(model, group);
  for (int step = 0; step < 6; ++step) {
    const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 8)
                            .rows(4 * rank.number(), 4 * rank.number() + 4);
    at::Tensor data = batch.data.to(torch::kFloat);
    // One rank overflows: all skip.
    if (step == 3 && rank.number() == 1) data = data * std::numeric_limits<float>::infinity();
    mixed.zero_grad(optimizer);
    const at::Tensor output = mixed.forward(ddp, data).to(torch::kFloat);
    const at::Tensor loss = sum_of_squares(output, batch.target.to(torch::kFloat));
    mixed.scale_loss(loss, optimizer).backward();
    EXPECT_EQ(mixed.step(optimizer), step == 3 ? amp::Step::skipped : amp::Step::stepped);
  }
}

TEST(Zero, WorksWithDistributedDataParallelAtAllLevels) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    using amp::OptLevel;
    for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3}) {
      for (const std::size_t kind : {0U, 2U, 3U}) {
        SCOPED_TRACE(std::string(amp::name_of(level)) + " " + all_kinds()[kind].name);
        const Factory make = all_kinds()[kind].make;
        const auto fp32_net = [] {
          Net model = seeded<Net>(1);
          model->to(torch::kFloat);
          return model;
        };
        Net alone = fp32_net();
        const auto reference = unsharded(make, alone->parameters());
        train_at(level, rank, group, alone, *reference);
        Net model = fp32_net();
        ZeroRedundancyOptimizer optimizer(model->parameters(), make, group);
        train_at(level, rank, group, model, optimizer);
        expect_same_weights(*model, *alone);
        // Masters, too.
        const auto& got = optimizer.param_groups()[0].params();
        const auto& want = reference->param_groups()[0].params();
        for (std::size_t i = 0; i < want.size(); ++i)
          EXPECT_TRUE(test::same_bits(got[i].detach(), want[i].detach())) << "master " << i;
      }
    }
  });
}

TEST(Zero, CarriesStateOverToMasterWeights) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const auto run = [&](const std::function<std::unique_ptr<torch::optim::Optimizer>(
                             const std::vector<at::Tensor>&)>& make) {
      Net model = seeded<Net>(1);
      model->to(torch::kBFloat16);
      auto optimizer = make(model->parameters());
      const auto back_propagate = [&](int step) {
        const Batch batch = batch_of(static_cast<std::uint64_t>(step), 8);
        sum_of_squares(model->forward(batch.data.to(torch::kBFloat16)),
                       batch.target.to(torch::kBFloat16))
            .backward();
      };
      back_propagate(0);
      optimizer->step();
      amp::MasterWeights masters(*optimizer);
      for (int step = 1; step < 4; ++step) {
        optimizer->zero_grad();
        model->zero_grad();
        back_propagate(step);
        EXPECT_FALSE(masters.take_gradients());
        optimizer->step();
        masters.write_model();
      }
      return model;
    };
    const Net alone = run([](const auto& parameters) { return unsharded(adam(), parameters); });
    const Net model = run([&](const auto& parameters) {
      return std::make_unique<ZeroRedundancyOptimizer>(parameters, adam(), group);
    });
    expect_same_weights(*model, *alone);
  });
}

TEST(Zero, WorksWithAGradScaler) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const auto run = [](Net& model, torch::optim::Optimizer& optimizer) {
      amp::GradScaler scaler(amp::LossScaleOptions().init_scale(1024.));
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        const Batch batch = batch_of(static_cast<std::uint64_t>(step), 8);
        const at::Tensor loss = sum_of_squares(model->forward(batch.data), batch.target);
        scaler.scale(step == 2 ? loss * INFINITY : loss).backward();
        scaler.step(optimizer);
        scaler.update();
      }
      EXPECT_EQ(scaler.scaler().skipped_steps(), 1);
    };
    Net alone = seeded<Net>(1);
    const auto reference = unsharded(adam(), alone->parameters());
    run(alone, *reference);
    Net model = seeded<Net>(1);
    ZeroRedundancyOptimizer optimizer(model->parameters(), adam(), group);
    run(model, optimizer);
    expect_same_weights(*model, *alone);
  });
}

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
        const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 8);
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

// The peak resident memory of this process, in MiB.
double peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    double kib = 0;
    if (word == "VmHWM:" && status >> kib) return kib / 1024;
  }
  return NAN;
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

TEST(ZeroErrors, NameRanksThatConsolidateElsewhere) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    ZeroRedundancyOptimizer optimizer(model->parameters(), adam(), group);
    expect_error([&] { optimizer.consolidate(rank.number()); },
                 {"consolidate", "rank 0: consolidate to rank 0", "rank 1: consolidate to rank 1"});
  });
}

TEST(ZeroErrors, NameARankThatIsLostInAStep) {
  test::RankOptions options;
  options.casualties = {1};
  const auto results = run_ranks(
      3,
      [](Rank& rank) {
        const auto group = comm::init();
        Net model = seeded<Net>(1);
        ZeroRedundancyOptimizer optimizer(model->parameters(), adam(), group);
        back_propagate(model, 0);
        optimizer.step();
        if (rank.number() == 1) std::raise(SIGKILL);
        try {
          for (;;) optimizer.step();
        } catch (const CommError& error) {
          EXPECT_EQ(error.ranks(), std::vector<int>{1});
          rank.report("lost");
        }
      },
      options);
  for (const std::size_t rank : {0u, 2u})
    EXPECT_THAT(results[rank].reports, ::testing::ElementsAre("lost"));
}

TEST(ZeroErrors, NameWhatDiffersOnEveryRank) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    const bool odd = rank.number() == 2;
    const auto leaf = [](at::IntArrayRef sizes) {
      return torch::ones(sizes, torch::requires_grad());
    };
    const auto refused = [&](const std::vector<at::Tensor>& parameters) {
      return error_of([&] { ZeroRedundancyOptimizer(parameters, adam(), group); });
    };
    const auto got = [](const std::string& text) {
      return AllOf(HasSubstr("[parallel.zero_redundancy_optimizer]"),
                   HasSubstr("on rank 2: " + text));
    };
    EXPECT_THAT(refused({leaf({2}), leaf({3, odd ? 5 : 4})}),
                got("parameter 1 of group 0 is float32[3, 5], on rank 0 float32[3, 4]"));
    EXPECT_THAT(refused(odd ? std::vector{leaf({2})} : std::vector{leaf({2}), leaf({3})}),
                got("no parameter 1 of group 0"));
    EXPECT_THAT(refused({odd ? leaf({2, 3}).detach().t().requires_grad_() : leaf({3, 2})}),
                got("parameter 0 of group 0 is float32[3, 2] with strides [1, 3]"));
    EXPECT_THAT(refused({}), got("no parameters"));
    EXPECT_THAT(refused({odd ? torch::ones({2}, torch::device(torch::kMeta)) : leaf({2})}),
                got("parameter 0 of group 0 on meta"));
    // Later, too.
    ZeroRedundancyOptimizer optimizer({leaf({2})}, adam(), group);
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({leaf({odd ? 1 : 2})}));
    EXPECT_THAT(error_of([&] { optimizer.step(); }), got("parameter 0 of group 1"));
  });
}

TEST(ZeroErrors, OfTheFactoryAreNamed) {
  Net model = seeded<Net>(1);
  const auto refused = [&](const Factory& make) {
    return error_of([&] { ZeroRedundancyOptimizer(model->parameters(), make, comm::Group()); });
  };
  EXPECT_THAT(refused(nullptr), HasSubstr("an optimizer from the factory, got none"));
  EXPECT_THAT(refused([](const ParamGroups&) { return nullptr; }), HasSubstr("got none"));
  EXPECT_THAT(refused([&](const ParamGroups&) {
                return std::make_unique<torch::optim::SGD>(model->first->parameters(), 0.1);
              }),
              HasSubstr("one of others"));
  EXPECT_THAT(refused(factory<torch::optim::LBFGS>(torch::optim::LBFGSOptions(1))),
              HasSubstr("got LBFGS"));
}

}  // namespace
}  // namespace semitone::parallel
