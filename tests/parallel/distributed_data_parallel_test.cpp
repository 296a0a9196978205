#include "semitone/parallel/distributed_data_parallel.h"

#include "semitone/comm/init.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <utility>
#include <vector>

namespace semitone::parallel {
namespace {

using test::all_ways;
using test::Batch;
using test::batch_of;
using test::copies;
using test::expect_equal_on_all_ranks;
using test::expect_error;
using test::expect_near;
using test::gradients_of;
using test::Net;
using test::Rank;
using test::run_ranks;
using test::seeded;
using test::sum_of_squares;
using test::train;

constexpr int kSteps = 20;

TEST(Ddp, TrainsAsOneProcessOnTheWholeBatch) {
  run_ranks(4, [](Rank& rank) {
    const auto group = comm::init();
    // The whole batch of 16 rows, in equal and unequal shares. A rank without a row takes part.
    const std::vector<std::vector<std::int64_t>> shares = {{4, 4, 4, 4}, {7, 1, 0, 8}};
    Net alone = seeded<Net>(1);
    const auto before = copies(alone->parameters());
    std::vector<at::Tensor> first_gradients;
    train(*alone, kSteps, [&](int step) {
      const Batch batch = batch_of(100 + step, 16);
      (sum_of_squares(alone->forward(batch.data), batch.target) / 16).backward();
      if (step == 0) first_gradients = copies(gradients_of(alone->parameters()));
    });
    for (const auto& [name, options] : all_ways()) {
      for (const auto& share : shares) {
        SCOPED_TRACE(name);
        // Different weights on the other ranks: rank 0's count.
        Net model = seeded<Net>(1 + static_cast<std::uint64_t>(rank.number()));
        DistributedDataParallel ddp(model, group, options);
        expect_near(model->parameters(), before, 0);
        std::int64_t begin = 0;
        for (int peer = 0; peer < rank.number(); ++peer)
          begin += share[static_cast<std::size_t>(peer)];
        const std::int64_t end = begin + share[static_cast<std::size_t>(rank.number())];
        train(*model, kSteps, [&](int step) {
          const Batch batch = batch_of(100 + step, 16).rows(begin, end);
          (sum_of_squares(ddp.forward(batch.data), batch.target) * 4 / 16).backward();
          if (step == 0) expect_near(gradients_of(model->parameters()), first_gradients);
        });
        expect_near(model->parameters(), alone->parameters());
        expect_equal_on_all_ranks(group, model->parameters());
      }
    }
  });
}

TEST(Ddp, WaitingForOtherRanksIsCommunication) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    for (const auto& [name, options] : all_ways()) {
      SCOPED_TRACE(name);
      Net model = seeded<Net>(1);
      DistributedDataParallel ddp(model, group, options);
      const Batch batch = batch_of(100, 4);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor loss = sum_of_squares(ddp.forward(batch.data), batch.target);
        const test::RecordedEvents events;
        loss.backward();
        const bool is_delayed = options.delay_allreduce();
        EXPECT_EQ(events.phases(),
                  is_delayed ? "communication() communication()" : "communication()");
      }
    }
  });
}

TEST(Ddp, AccumulatesWithoutCommunicationInNoSync) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net alone = seeded<Net>(1);
    train(*alone, 5, [&](int step) {
      const Batch batch = batch_of(100 + step, 8);
      (sum_of_squares(alone->forward(batch.data), batch.target) / 8).backward();
    });
    for (const auto& [name, options] : all_ways()) {
      SCOPED_TRACE(name);
      Net model = seeded<Net>(1);
      DistributedDataParallel ddp(model, group, options);
      train(*model, 5, [&](int step) {
        const Batch batch = batch_of(100 + step, 8);
        const std::int64_t begin = 4 * rank.number();
        const auto pass = [&](std::int64_t from, std::int64_t to) {
          const Batch rows = batch.rows(begin + from, begin + to);
          (sum_of_squares(ddp.forward(rows.data), rows.target) * 2 / 8).backward();
        };
        // Rank 1 in three parts, rank 0 in two: nothing is communicated before the last.
        {
          const auto local = ddp.no_sync();
          pass(0, 1);
          if (rank.number() == 1) pass(1, 2);
        }
        if (step == 0) {
          const auto others = group.all_gather(model->second->bias.grad());
          EXPECT_FALSE(torch::equal(others[0], others[1]));
        }
        pass(rank.number() == 1 ? 2 : 1, 4);
      });
      expect_near(model->parameters(), alone->parameters());
    }
  });
}

TEST(Ddp, TakesChannelsLastAsItIs) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto conv_of = [](std::uint64_t seed) {
      torch::manual_seed(seed);
      torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 3));
      conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
      return conv;
    };
    torch::nn::Conv2d alone = conv_of(0);
    torch::nn::Conv2d model = conv_of(static_cast<std::uint64_t>(rank.number()));
    DistributedDataParallel ddp(model, group);
    torch::manual_seed(9);
    const at::Tensor images = torch::randn({4, 3, 8, 8});
    for (int step = 0; step < 2; ++step) {
      alone->zero_grad();
      model->zero_grad();
      alone(images).square().mean().backward();
      ddp.forward(images.slice(0, 2 * rank.number(), 2 * rank.number() + 2))
          .square()
          .mean()
          .backward();
      expect_near(gradients_of(model->parameters()), gradients_of(alone->parameters()), 1e-5);
      EXPECT_EQ(model->weight.grad().strides(), model->weight.strides());
    }
  });
}

// torch::load gives the parameters new autograd nodes.
TEST(Ddp, WeightsMayBeLoadedAfterwards) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto& [name, options] : all_ways()) {
      SCOPED_TRACE(name);
      std::stringstream file;
      torch::save(seeded<Net>(2), file);
      Net model = seeded<Net>(1);
      DistributedDataParallel ddp(model, group, options);
      for (int step = 0; step < 2; ++step) {
        file.seekg(0);
        torch::load(model, file);
        model->zero_grad();
        const Batch batch = batch_of(rank.number(), 2);
        sum_of_squares(ddp.forward(batch.data), batch.target).backward();
        expect_equal_on_all_ranks(group, gradients_of(model->parameters()));
      }
    }
  });
}

TEST(Ddp, NoSyncNests) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    const auto differs = [&] {
      const Batch batch = batch_of(rank.number(), 2);
      model->zero_grad();
      sum_of_squares(ddp.forward(batch.data), batch.target).backward();
      const auto all = group.all_gather(model->second->bias.grad());
      return !torch::equal(all[0], all[1]);
    };
    EXPECT_FALSE(differs());
    {
      const auto outer = ddp.no_sync();
      {
        auto inner = ddp.no_sync();
        const auto moved = std::move(inner);
        EXPECT_TRUE(differs());
      }
      EXPECT_TRUE(differs());
    }
    EXPECT_FALSE(differs());
  });
}

// A forward in grad mode whose result is thrown away, as in a validation without NoGradGuard.
TEST(Ddp, NoSyncCommunicatesNothingAfterAForwardWithoutBackward) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto& [name, options] : all_ways()) {
      SCOPED_TRACE(name);
      Net alone = seeded<Net>(1);
      Net model = seeded<Net>(1);
      DistributedDataParallelOptions quiet = options;
      DistributedDataParallel ddp(model, group, quiet.broadcast_buffers(false));
      for (int step = 0; step < 3; ++step) {
        const Batch batch = batch_of(100 + step, 8);
        const Batch rows = batch.rows(4 * rank.number(), 4 * rank.number() + 4);
        model->zero_grad();
        alone->zero_grad();
        // First on one rank only: no other rank would answer its next message. Later, all ranks
        // must call forward equally often.
        if (step > 0 || rank.number() == 0) ddp.forward(batch.data);
        {
          const auto local = ddp.no_sync();
          const Batch part = rows.rows(0, 1);
          sum_of_squares(ddp.forward(part.data), part.target).backward();
        }
        const auto others = group.all_gather(model->second->bias.grad());
        EXPECT_FALSE(torch::equal(others[0], others[1]));
        const Batch part = rows.rows(1, 4);
        sum_of_squares(ddp.forward(part.data), part.target).backward();
        (sum_of_squares(alone->forward(batch.data), batch.target) / 2).backward();
        expect_near(gradients_of(model->parameters()), gradients_of(alone->parameters()));
      }
    }
  });
}

TEST(Buffers, AreRankZerosInEveryForward) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool broadcast : {true, false}) {
      for (const auto& options : {DistributedDataParallelOptions(),
                                  DistributedDataParallelOptions().delay_allreduce(true)}) {
        Net model = seeded<Net>(1, true);
        Net reference = seeded<Net>(1, true);
        DistributedDataParallelOptions all = options;
        DistributedDataParallel ddp(model, group, all.broadcast_buffers(broadcast));
        const auto rows = [&](int step, int of) { return batch_of(10 * step + of, 4); };
        for (int step = 0; step < 3; ++step) {
          const Batch batch = rows(step, rank.number());
          sum_of_squares(ddp.forward(batch.data), batch.target).backward();
        }
        // Each forward starts from rank 0's statistics, and adds its own batch.
        const auto mean_after = [&](int steps, int of, int last_of) {
          torch::NoGradGuard no_grad;
          at::Tensor mean = torch::zeros({8}, torch::kDouble);
          for (int step = 0; step < steps; ++step) {
            const Batch batch = rows(step, step + 1 == steps ? last_of : of);
            mean = 0.9 * mean + 0.1 * reference->first->forward(batch.data).mean(0);
          }
          return mean;
        };
        EXPECT_TRUE(test::near(model->norm->running_mean,
                               mean_after(3, broadcast ? 0 : rank.number(), rank.number()), 1e-12));
        EXPECT_EQ(model->norm->num_batches_tracked.item<std::int64_t>(), 3);
        const auto all_means = group.all_gather(model->norm->running_mean);
        EXPECT_FALSE(torch::equal(all_means[0], all_means[1]));
      }
    }
  });
}

// Gloo supports neither complex numbers nor int16.
TEST(Buffers, MayBeOfAnyDtype) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    const auto phases = torch::full({2, 3}, rank.number(), torch::kComplexFloat).t();
    model->register_buffer("phases", phases);
    model->register_buffer("counts", torch::full({}, rank.number(), torch::kShort));
    DistributedDataParallel ddp(model, group);
    const auto expect_rank_zeros = [&] {
      EXPECT_EQ(torch::real(phases).sum().item<float>(), 0);
      EXPECT_EQ(model->named_buffers()["counts"].item<int>(), 0);
    };
    expect_rank_zeros();
    phases.fill_(rank.number());
    model->named_buffers()["counts"].fill_(rank.number());
    const Batch batch = batch_of(1, 2);
    sum_of_squares(ddp.forward(batch.data), batch.target).backward();
    expect_rank_zeros();
  });
}

TEST(Evaluation, CommunicatesNothing) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1, true);
    DistributedDataParallel ddp(model, group);
    if (rank.number() == 1) {
      const torch::NoGradGuard no_grad;
      model->eval();
      for (int i = 0; i < 3; ++i) ddp.forward(batch_of(1, 4).data);
      model->train();
    }
    ddp.forward(batch_of(1, 4).data).sum().backward();
  });
}

TEST(SingleProcess, OnlyCallsTheModel) {
  Net model = seeded<Net>(1);
  DistributedDataParallel ddp(model, comm::Group());
  const Batch batch = batch_of(1, 2);
  sum_of_squares(ddp(batch.data), batch.target).backward();
  EXPECT_TRUE(model->first->weight.grad().defined());
  int runs = 0;
  ddp.join([&] { ++runs; });
  EXPECT_EQ(runs, 1);
  EXPECT_EQ(ddp->first->weight.data_ptr(), model->first->weight.data_ptr());
  EXPECT_EQ(&*ddp, model.get());
  for (const at::Tensor& parameter : model->parameters()) parameter.set_requires_grad(false);
  expect_error([&] { DistributedDataParallel frozen(model, comm::Group()); },
               {"no parameter that needs a gradient"});
}

TEST(Script, ModulesTrainLikeOthers) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::jit::Module model("Scale");
    torch::manual_seed(static_cast<std::uint64_t>(rank.number()));
    model.register_parameter("weight", torch::randn({6}, torch::kDouble).requires_grad_(), false);
    model.register_buffer("steps", torch::zeros({1}, torch::kDouble));
    model.define(
        "def forward(self, x):\n    self.steps += 1\n    return (x * self.weight).sum()\n");
    DistributedDataParallel ddp(model, group);
    expect_equal_on_all_ranks(group, {model.attr("weight").toTensor()});
    const std::vector<at::Tensor> inputs = {torch::ones({6}, torch::kDouble),
                                            torch::full({6}, 3, torch::kDouble)};
    const c10::IValue output = ddp.forward(inputs[static_cast<std::size_t>(rank.number())]);
    output.toTensor().backward();
    EXPECT_TRUE(test::same_bits(model.attr("weight").toTensor().grad(),
                                torch::full({6}, 2, torch::kDouble)));
  });
}

TEST(Script, ModulesTakeArgumentsByName) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::jit::Module model("Scale");
    model.register_parameter("weight", torch::ones({6}).requires_grad_(), false);
    model.define(
        "def forward(self, x, factor: float = 1.0):\n    return (x * self.weight).sum() * "
        "factor\n");
    DistributedDataParallel ddp(model, group);
    const std::vector<c10::IValue> inputs{torch::ones({6}) * (1 + rank.number())};
    const torch::jit::Kwargs named{{"factor", 2.0}};
    ddp.forward(inputs, named).toTensor().backward();
    EXPECT_TRUE(test::same_bits(model.attr("weight").toTensor().grad(), torch::full({6}, 3.0F)));
  });
}

// `self.mean = …` gives the module another tensor.
TEST(Script, BuffersThatAreReplacedStayEqualOnAllRanks) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::jit::Module model("Scale");
    model.register_parameter("weight", torch::ones({6}).requires_grad_(), false);
    model.register_buffer("mean", torch::zeros({6}));
    model.define(
        "def forward(self, x):\n    self.mean = self.mean * 0.5 + x\n"
        "    return (x * self.weight).sum() + self.mean.sum()\n");
    DistributedDataParallel ddp(model, group);
    at::Tensor expected = torch::zeros({6});
    for (int step = 0; step < 3; ++step) {
      // Rank 0's values of the step before.
      const at::Tensor input = torch::full({6}, 1 + rank.number());
      ddp.forward(input).toTensor().backward();
      EXPECT_TRUE(torch::equal(model.attr("mean").toTensor(), expected * 0.5 + input)) << step;
      expected = expected * 0.5 + 1;
    }
  });
}

}  // namespace
}  // namespace semitone::parallel
