#include "semitone/amp/initialize.h"
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace semitone::parallel::join_test {
namespace {

using test::Batch;
using test::batch_of;
using test::expect_equal_on_all_ranks;
using test::expect_error;
using test::Heads;
using test::Net;
using test::Rank;
using test::run_ranks;
using test::seeded;
using test::sum_of_squares;

// How many batches each of three ranks has.
const std::vector<int> kBatches = {3, 6, 2};

Batch batch_for(int rank, int step) {
  return batch_of(100 * rank + step, 4);
}

// The ranks' joint computation on a single rank: `loss` of each rank that has a batch in a step.
template <typename Model>
void train_alone(Model& model, bool divide_by_all,
                 const std::function<at::Tensor(Model&, int, int)>& loss) {
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    int live = 0;
    for (const int batches : kBatches) live += step < batches ? 1 : 0;
    for (int rank = 0; rank < 3; ++rank) {
      if (step < kBatches[static_cast<std::size_t>(rank)])
        (loss(model, rank, step) / (divide_by_all ? 3 : live)).backward();
    }
    optimizer.step();
  }
}

TEST(Join, TrainsAsOneProcessOnAllBatches) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    const auto loss_of = [](Heads& model, int of, int step) {
      const Batch batch = batch_for(of, step);
      return sum_of_squares(model->forward(batch.data, step % 2 == 0), batch.target);
    };
    for (const bool divide_by_all : {true, false}) {
      Heads alone = seeded<Heads>(1);
      train_alone<Heads>(alone, divide_by_all, loss_of);
      const std::vector<DistributedDataParallelOptions> ways = {
          DistributedDataParallelOptions().find_unused_parameters(true),
          DistributedDataParallelOptions().find_unused_parameters(true).gradient_as_bucket_view(
              true),
          DistributedDataParallelOptions()
              .find_unused_parameters(true)
              .bucket_cap_mb(0.0003)
              .first_bucket_mb(0.0001),
          DistributedDataParallelOptions().find_unused_parameters(true).gradient_predivide_factor(
              1.5),
          DistributedDataParallelOptions().delay_allreduce(true)};
      for (std::size_t way = 0; way < ways.size(); ++way) {
        SCOPED_TRACE(way);
        Heads model = seeded<Heads>(1);
        DistributedDataParallel ddp(model, group, ways[way]);
        torch::optim::SGD optimizer(model->parameters(),
                                    torch::optim::SGDOptions(0.05).momentum(0.9));
        JoinOptions options;
        options.divide_by_initial_world_size(divide_by_all);
        ddp.join(
            [&] {
              for (int step = 0; step < kBatches[static_cast<std::size_t>(rank.number())]; ++step) {
                optimizer.zero_grad();
                const Batch batch = batch_for(rank.number(), step);
                sum_of_squares(ddp.forward(batch.data, step % 2 == 0), batch.target).backward();
                optimizer.step();
              }
            },
            options);
        for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
          EXPECT_TRUE(
              test::near(model->parameters()[i], alone->parameters()[i], test::kSumTolerance))
              << i;
        }
      }
    }
  });
}

// One without a backward pass, on one rank.
TEST(Join, AForwardBeforeItIsNoneOfItsSteps) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    Heads alone = seeded<Heads>(1);
    train_alone<Heads>(alone, true, [](Heads& model, int of, int step) {
      const Batch batch = batch_for(of, step);
      return sum_of_squares(model->forward(batch.data, true), batch.target);
    });
    Heads model = seeded<Heads>(1);
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    if (rank.number() == 0) ddp.forward(batch_for(0, 0).data, true);
    ddp.join([&] {
      for (int step = 0; step < kBatches[static_cast<std::size_t>(rank.number())]; ++step) {
        optimizer.zero_grad();
        const Batch batch = batch_for(rank.number(), step);
        sum_of_squares(ddp.forward(batch.data, true), batch.target).backward();
        optimizer.step();
      }
    });
    for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
      EXPECT_TRUE(test::near(model->parameters()[i], alone->parameters()[i], test::kSumTolerance))
          << i;
    }
  });
}

// Two epochs: the second depends on the state after the first: momentum, masters, loss scale.
TEST(Join, RanksThatFollowStayEqualBitForBit) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    const std::vector<std::pair<amp::OptLevel, DistributedDataParallelOptions>> cases = {
        {amp::OptLevel::O1, DistributedDataParallelOptions().find_unused_parameters(true)},
        {amp::OptLevel::O2,
         DistributedDataParallelOptions().find_unused_parameters(true).gradient_as_bucket_view(
             true)},
        {amp::OptLevel::O2, DistributedDataParallelOptions().delay_allreduce(true)},
        {amp::OptLevel::O3,
         DistributedDataParallelOptions().find_unused_parameters(true).compress(torch::kHalf)}};
    for (std::size_t which = 0; which < cases.size(); ++which) {
      SCOPED_TRACE(which);
      Heads model = seeded<Heads>(1);
      model->to(torch::kFloat);
      torch::optim::SGD optimizer(model->parameters(),
                                  torch::optim::SGDOptions(0.01).momentum(0.9));
      auto mixed = amp::initialize(
          model, optimizer,
          amp::Options(cases[which].first).dtype(torch::kHalf).verbosity(0).loss_scale("dynamic"));
      DistributedDataParallel ddp(model, group, cases[which].second);
      int steps = 0;
      JoinOptions options;
      options.follow([&](const auto& receive) {
        auto none = mixed.scale_loss(torch::zeros({}), optimizer);
        none.value();
        receive();
        none.finish();
        mixed.step(optimizer);
        mixed.zero_grad(optimizer);
        ++steps;
      });
      for (int epoch = 0; epoch < 2; ++epoch) {
        ddp.join(
            [&] {
              for (int step = 0; step < kBatches[static_cast<std::size_t>(rank.number())]; ++step) {
                const Batch batch = batch_for(rank.number(), step);
                const auto output = mixed.forward(ddp, batch.data.to(torch::kFloat), step % 2 == 0);
                at::Tensor loss =
                    sum_of_squares(output.to(torch::kFloat), batch.target.to(torch::kFloat));
                // The number of the only rank that is left.
                if (step == 4 && epoch == 0) loss = loss * HUGE_VAL;
                mixed.scale_loss(loss, optimizer).backward();
                mixed.step(optimizer);
                mixed.zero_grad(optimizer);
                ++steps;
              }
            },
            options);
      }
      EXPECT_EQ(steps, 12);
      EXPECT_GE(mixed.skipped_steps(), 1);
      EXPECT_EQ(group.broadcast(std::to_string(mixed.loss_scaler().scale())),
                std::to_string(mixed.loss_scaler().scale()));
      std::vector<at::Tensor> state = mixed.master_params(optimizer);
      for (const at::Tensor& parameter : mixed.master_params(optimizer)) {
        const auto known = optimizer.state().find(parameter.unsafeGetTensorImpl());
        if (known == optimizer.state().end()) continue;  // `never`
        state.push_back(
            static_cast<torch::optim::SGDParamState&>(*known->second).momentum_buffer());
      }
      EXPECT_EQ(state.size(), 14U);  // eight parameters, six of them with momentum
      expect_equal_on_all_ranks(group, state);
    }
  });
}

TEST(Join, WhatComesAfterItIsDividedByAllRanksAgain) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    const auto gradient_of = [&](int seed) {
      const Batch batch = batch_for(seed, 0);
      sum_of_squares(ddp.forward(batch.data), batch.target).backward();
    };
    JoinOptions options;
    options.divide_by_initial_world_size(false);
    ddp.join(
        [&] {
          for (int step = 0; step < 1 + 2 * rank.number(); ++step) gradient_of(rank.number());
        },
        options);
    model->zero_grad();
    gradient_of(rank.number());
    Net alone = seeded<Net>(1);
    for (int of = 0; of < 2; ++of) {
      const Batch batch = batch_for(of, 0);
      (sum_of_squares(alone->forward(batch.data), batch.target) / 2).backward();
    }
    for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
      EXPECT_TRUE(test::near(model->parameters()[i].grad(), alone->parameters()[i].grad(),
                             test::kSumTolerance))
          << i;
    }
  });
}

TEST(Join, RefusesWhatARankWithoutInputCannotReduce) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel fixed(model, group,
                                  DistributedDataParallelOptions().static_graph(true));
    expect_error([&] { fixed.join([] {}); }, {"[parallel.join]", "static_graph"});
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    DistributedDataParallel sparse(table, group);
    expect_error([&] { sparse.join([] {}); }, {"[parallel.join]", "'weight' with sparse"});
    DistributedDataParallel hooked(
        model, group,
        DistributedDataParallelOptions().comm_hook(std::make_shared<test::MeanHook>()));
    expect_error([&] { hooked.join([] {}, JoinOptions().divide_by_initial_world_size(false)); },
                 {"[parallel.join]", "divide_by_initial_world_size", "comm_hook"});
  });
}

TEST(Join, RefusesASecondBackwardPassOfAForward) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().delay_allreduce(true));
    ddp.join([&] {
      for (int step = 0; step < 2; ++step) {
        const at::Tensor output = ddp.forward(batch_for(0, step).data);
        output.sum().backward({}, true);
        expect_error([&] { output.pow(2).sum().backward(); },
                     {"[parallel.join]", "one backward pass for each ddp.forward()", "a second"});
      }
    });
    // Elsewhere it is allowed.
    const at::Tensor output = ddp.forward(batch_for(0, 0).data);
    output.sum().backward({}, true);
    output.pow(2).sum().backward();
  });
}

// Rank 0 has no input any more, rank 1 accumulates, and rank 2 reduces, as at its last batch.
TEST(Join, NoSyncInDifferentStepsIsAnErrorOnAllRanks) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    const Batch batch = batch_for(rank.number(), 0);
    const auto pass = [&] { sum_of_squares(ddp.forward(batch.data), batch.target).backward(); };
    const auto loop = [&] {
      pass();
      if (rank.number() == 1) {
        const auto local = ddp.no_sync();
        pass();
      } else if (rank.number() == 2) {
        pass();
      }
    };
    expect_error([&] { ddp.join(loop); },
                 {"[parallel.join]", "no_sync in the same steps on all ranks", "1 of 2 ranks"});
    // All ranks are at the same place: the group is still usable.
    model->zero_grad();
    pass();
    expect_equal_on_all_ranks(group, test::gradients_of(model->parameters()));
  });
}

TEST(Join, GradientsOfNoSyncThatNoStepWouldReduceAreAnErrorOnAllRanks) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    const auto loop = [&](bool drops) {
      // Two batches a step; rank 0 runs out between them.
      for (int i = 0; i < (rank.number() == 0 ? 3 : 6); ++i) {
        const Batch batch = batch_for(rank.number(), i);
        std::optional<NoSync> local;
        if (i % 2 == 0) {
          model->zero_grad(/*set_to_none=*/false);
          local.emplace(ddp.no_sync());
        }
        sum_of_squares(ddp.forward(batch.data), batch.target).backward();
      }
      if (drops && rank.number() == 0) model->zero_grad(/*set_to_none=*/false);
    };
    expect_error([&] { ddp.join([&] { loop(false); }); },
                 {"[parallel.join]", "no gradients of no_sync on ranks without input", "1 of 1",
                  "end each rank's loop after a step that reduces, or with zero_grad()"});
    model->zero_grad();
    const auto follow = JoinOptions().follow([&](const auto& receive) {
      model->zero_grad();
      receive();
    });
    ddp.join([&] { loop(true); }, follow);
    expect_equal_on_all_ranks(group, test::gradients_of(model->parameters()));
  });
}

TEST(Join, AFollowThatDoesNotReceiveIsAnError) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    JoinOptions options;
    options.follow([](const auto&) {});
    const auto loop = [&] {
      if (rank.number() == 0) {
        const Batch batch = batch_for(0, 0);
        sum_of_squares(ddp.forward(batch.data), batch.target).backward();
      }
    };
    if (rank.number() == 1) {
      test::expect_error([&] { ddp.join(loop, options); }, {"[parallel.join]", "receive()"});
    } else {
      EXPECT_THROW(ddp.join(loop, options), CommError);
    }
  });
}

TEST(Join, RebuildsBucketsAndSharesBuffersWithTheRanksThatGoOn) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1, true);
    DistributedDataParallel ddp(
        model, group,
        DistributedDataParallelOptions().bucket_cap_mb(0.0002).first_bucket_mb(0.0001));
    // Rank 0, whose buffers count otherwise, has nothing at all.
    const int batches = rank.number() == 0 ? 0 : rank.number() == 1 ? 4 : 2;
    ddp.join([&] {
      for (int step = 0; step < batches; ++step) {
        const Batch batch = batch_for(rank.number(), step);
        {
          const auto local = ddp.no_sync();
          sum_of_squares(ddp.forward(batch.data), batch.target).backward();
        }
        sum_of_squares(ddp.forward(batch.data), batch.target).backward();
      }
    });
    // Rank 1's, the last.
    EXPECT_EQ(model->norm->num_batches_tracked.item<std::int64_t>(), 8);
    expect_equal_on_all_ranks(group, model->buffers());
  });
}

TEST(Join, WithEqualInputsChangesNothing) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto trained = [&](bool joined) {
      Net model = seeded<Net>(1);
      DistributedDataParallel ddp(model, group);
      const auto loop = [&] {
        test::train(*model, 3, [&](int step) {
          const Batch batch = batch_for(rank.number(), step);
          sum_of_squares(ddp.forward(batch.data), batch.target).backward();
        });
      };
      joined ? ddp.join(loop) : loop();
      // The next loop works as usual.
      loop();
      return test::copies(model->parameters());
    };
    const auto with = trained(true);
    const auto without = trained(false);
    EXPECT_TRUE(test::same_bits(with, without));
  });
}

TEST(Join, EndsOnAllRanksWhereThatIsAskedFor) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    JoinOptions options;
    options.throw_on_early_termination(true);
    int steps = 0;
    expect_error(
        [&] {
          ddp.join(
              [&] {
                for (; steps < (rank.number() == 1 ? 2 : 5); ++steps) {
                  const Batch batch = batch_for(rank.number(), steps);
                  sum_of_squares(ddp.forward(batch.data), batch.target).backward();
                }
              },
              options);
        },
        {"[parallel.join]", "none left on rank 1"});
    EXPECT_EQ(steps, 2);
    // All ranks are at the same place: the group is still usable.
    sum_of_squares(ddp.forward(batch_for(0, 0).data), batch_for(0, 0).target).backward();
  });
}

// The group continues, as if the exception was caught: the others must not wait for the next step.
TEST(Join, ALoopThatThrowsLeavesTheGroup) {
  const auto results = run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    const auto join = [&] {
      ddp.join([&] {
        for (int step = 0; step < 5; ++step) {
          if (rank.number() == 1 && step == 2) throw std::runtime_error("a bad file");
          const Batch batch = batch_for(rank.number(), step);
          sum_of_squares(ddp.forward(batch.data), batch.target).backward();
        }
      });
    };
    if (rank.number() == 1) {
      EXPECT_THROW(join(), std::runtime_error);
      for (const char* other : {"0", "2"})
        EXPECT_TRUE(
            test::eventually([&] { return std::filesystem::exists(rank.folder() / other); }));
      EXPECT_THROW(group.barrier(), CommError);
      return;
    }
    try {
      join();
      ADD_FAILURE();
    } catch (const CommError& error) {
      EXPECT_EQ(error.ranks(), std::vector<int>{1});
      rank.report(error.what());
    }
    std::ofstream(rank.folder() / std::to_string(rank.number())) << "caught";
  });
  for (const int rank : {0, 2}) {
    const auto& reports = results[static_cast<std::size_t>(rank)].reports;
    ASSERT_EQ(reports.size(), 1u);
    EXPECT_NE(reports[0].find("rank 1 lost: left a joined loop by an exception"), std::string::npos)
        << reports[0];
  }
}

TEST(Join, DoesNotNest) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    ddp.join([&] { expect_error([&] { ddp.join([] {}); }, {"[parallel.join]"}); });
  });
}

}  // namespace
}  // namespace semitone::parallel::join_test
