#include "semitone/parallel/zero_redundancy_optimizer.h"

#include "semitone/comm/group.h"
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_lamb.h"
#include "src/comm/process_group.h"
#include "tests/parallel/models.h"
#include "tests/parallel/zero_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdint>
#include <exception>
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
using ::testing::AllOf;
using ::testing::HasSubstr;

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

TEST(Zero, WaitingForTheOwnersOfWeightsIsCommunication) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    ZeroRedundancyOptimizer optimizer(model->parameters(), adam(), group);
    back_propagate(model, 0);
    const test::RecordedEvents events;
    optimizer.step();
    EXPECT_EQ(events.phases(), "optimizer() communication() communication()");
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

// The largest parameter comes first: without its owner's memory, others would go to another rank.
TEST(Zero, ParametersKeepTheirStateWhenAGroupChanges) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const auto train = [](auto&& make_optimizer) {
      std::vector<at::Tensor> all;
      for (const std::int64_t size : {5, 4, 3, 9, 2})
        all.push_back(torch::arange(1.F, 1.F + static_cast<float>(size)).requires_grad_());
      const auto optimizer = make_optimizer(std::vector<at::Tensor>{all[0], all[1], all[2]});
      const auto step = [&](float value) {
        for (const at::Tensor& parameter : all)
          parameter.mutable_grad() = parameter.detach() * value;
        optimizer->step();
      };
      auto& parameters = optimizer->param_groups()[0].params();
      step(1);
      step(2);
      parameters.push_back(all[3]);
      step(-3);
      parameters.erase(parameters.begin());
      step(4);
      parameters.insert(parameters.begin(), all[4]);
      step(-5);
      return all;
    };
    const auto want = train([](std::vector<at::Tensor> parameters) {
      return unsharded(adam(), std::move(parameters));
    });
    const auto got = train([&](std::vector<at::Tensor> parameters) {
      return std::make_unique<ZeroRedundancyOptimizer>(std::move(parameters), adam(), group);
    });
    for (std::size_t i = 0; i < want.size(); ++i)
      test::expect_bitwise_equal(got[i].detach(), want[i].detach());
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
        rank.meet();
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

TEST(ZeroErrors, NameARankWhoseStepThrows) {
  const auto results = run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    std::vector<at::Tensor> parameters{torch::ones({4}).requires_grad_(),
                                       torch::ones({4}).requires_grad_()};
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = torch::ones({4});
    ZeroRedundancyOptimizer optimizer(parameters, adam(), group);
    // One rank owns it, and only that one looks at it.
    parameters[1].mutable_grad() = torch::ones({4}).to_sparse();
    try {
      optimizer.step();
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("left an optimizer's step by an exception"));
      rank.report("told");
    } catch (const std::exception&) {
      rank.report("threw");
    }
  });
  std::vector<std::string> reports;
  for (const auto& result : results)
    reports.insert(reports.end(), result.reports.begin(), result.reports.end());
  EXPECT_THAT(reports, ::testing::UnorderedElementsAre("told", "threw"));
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

// Each would be stepped by its own rank, and the last one to be sent would win.
TEST(ZeroErrors, ParametersThatShareMemoryAreRefused) {
  const auto tied_weights = [] {
    const at::Tensor weight = torch::ones({3, 4}, torch::requires_grad());
    at::Tensor tied = torch::ones({3, 4}, torch::requires_grad());
    tied.set_data(weight.detach());
    return std::vector<at::Tensor>{weight, tied};
  };
  run_ranks(2, [&](Rank&) {
    const auto group = comm::init();
    const auto refused = [&](const std::vector<at::Tensor>& parameters) {
      return error_of([&] { ZeroRedundancyOptimizer(parameters, adam(), group); });
    };
    EXPECT_THAT(refused(tied_weights()),
                HasSubstr("parameter 1 of group 0 in the memory of parameter 0 of group 0: "
                          "register one tensor in both places"));
    const at::Tensor storage = torch::zeros({4, 6});
    const auto part = [&](int dim, std::int64_t begin, std::int64_t end) {
      return storage.slice(dim, begin, end).detach().requires_grad_();
    };
    EXPECT_THAT(refused({part(0, 1, 3), part(0, 0, 2)}),
                HasSubstr("parameter 0 of group 0 in the memory of parameter 1 of group 0"));
    // Disjoint rows, and columns.
    const auto takes = [&](const std::vector<at::Tensor>& parameters) {
      ZeroRedundancyOptimizer optimizer(parameters, adam(), group);
      return optimizer.param_groups()[0].params().size() == parameters.size();
    };
    EXPECT_TRUE(takes({part(0, 0, 2), part(0, 2, 4)}));
    EXPECT_TRUE(takes({part(1, 0, 3), part(1, 3, 6)}));
  });
  // As the unsharded optimizer.
  ZeroRedundancyOptimizer(tied_weights(), adam(), comm::Group());
}

// LAMB clips by the norm of all gradients, of which a rank has a share.
TEST(ZeroErrors, ANormOfAllGradientsIsRefused) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    const auto lamb = [](double max_grad_norm) {
      return factory<optim::FusedLAMB>(optim::FusedLAMBOptions().max_grad_norm(max_grad_norm));
    };
    EXPECT_THAT(
        error_of([&] { ZeroRedundancyOptimizer(model->parameters(), lamb(1), group); }),
        HasSubstr("got one with max_grad_norm, which needs the norm of all gradients — set"));
    ZeroRedundancyOptimizer(model->parameters(), lamb(0), group);
  });
  Net alone = seeded<Net>(1);
  ZeroRedundancyOptimizer(alone->parameters(), factory<optim::FusedLAMB>(optim::FusedLAMBOptions()),
                          comm::Group());
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
}  // namespace semitone::parallel::zero_test
