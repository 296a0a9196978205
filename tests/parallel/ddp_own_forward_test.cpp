// DistributedDataParallel with delay_allreduce, in programs that call the model's own forward.
#include "semitone/amp/initialize.h"
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace semitone::parallel::ddp_own_forward_test {
namespace {

using test::Batch;
using test::batch_of;
using test::copies;
using test::expect_bitwise_equal;
using test::expect_equal_on_all_ranks;
using test::expect_error;
using test::expect_near;
using test::gradients_of;
using test::Net;
using test::Rank;
using test::run_ranks;
using test::seeded;
using test::sum_of_squares;

DistributedDataParallelOptions delayed() {
  return DistributedDataParallelOptions().delay_allreduce(true);
}

// This rank's rows of a step's batch of 8.
Batch share_of(int step, const Rank& rank) {
  return batch_of(100 + step, 8).rows(4 * rank.number(), 4 * rank.number() + 4);
}

// A function of a program that does not know of other ranks.
at::Tensor loss_of(Net& model, const Batch& batch) {
  return sum_of_squares(model->forward(batch.data), batch.target);
}

TEST(OwnForward, TrainsAsOneProcessWithTheWholeBatch) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net alone = seeded<Net>(1);
    test::train(*alone, 10,
                [&](int step) { (loss_of(alone, batch_of(100 + step, 8)) / 2).backward(); });
    // Each rank has other weights before.
    Net model = seeded<Net>(1 + static_cast<std::uint64_t>(rank.number()));
    const DistributedDataParallel ddp(model, group, delayed());
    test::train(*model, 10, [&](int step) { loss_of(model, share_of(step, rank)).backward(); });
    expect_near(model->parameters(), alone->parameters());
    expect_equal_on_all_ranks(group, model->parameters());
  });
}

// With master weights too, and with steps that one rank's overflow skips on both.
TEST(OwnForward, TakesTheStepsOfTheWrappersForward) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto level : {amp::OptLevel::O1, amp::OptLevel::O2}) {
      const auto train = [&](bool own) {
        Net model = seeded<Net>(1);
        model->to(torch::kFloat);
        torch::optim::SGD optimizer(model->parameters(), 0.01);
        auto mixed =
            amp::initialize(model, optimizer, amp::Options(level).dtype(torch::kHalf).verbosity(0));
        DistributedDataParallel ddp(model, group, delayed());
        int skipped = 0;
        for (int step = 0; step < 6; ++step) {
          Batch batch = share_of(step, rank);
          if (step == 2 && rank.number() == 1) batch.data.fill_(1e30);
          const at::Tensor data = batch.data.to(torch::kFloat);
          const at::Tensor output = own ? mixed.forward(model, data) : mixed.forward(ddp, data);
          const at::Tensor loss = sum_of_squares(output, batch.target.to(torch::kFloat));
          mixed.scale_loss(loss, optimizer).backward();
          if (mixed.step(optimizer) == amp::Step::skipped) ++skipped;
          mixed.zero_grad(optimizer);
        }
        EXPECT_GE(skipped, 1);
        EXPECT_LT(skipped, 6);
        return copies(mixed.master_params(optimizer));
      };
      const auto own = train(true);
      expect_bitwise_equal(own, train(false));
      expect_equal_on_all_ranks(group, own);
    }
  });
}

// A GAN: one model's loss reaches the other, and several backward passes make a step.
TEST(OwnForward, ReducesEachModelThatABackwardPassReaches) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net first = seeded<Net>(1);
    torch::nn::Linear second(3, 1);
    second->to(torch::kDouble);
    const auto losses_of = [&](const Batch& batch) {
      const at::Tensor hidden = first->forward(batch.data);
      return std::vector<at::Tensor>{second->forward(hidden.detach()).square().sum(),
                                     second->forward(hidden).sum()};
    };
    const auto all_gradients = [&] {
      auto gradients = gradients_of(first->parameters());
      for (const at::Tensor& gradient : gradients_of(second->parameters()))
        gradients.push_back(gradient);
      return copies(gradients);
    };
    const DistributedDataParallel ddp_first(first, group, delayed());
    const DistributedDataParallel ddp_second(second, group, delayed());
    for (int step = 0; step < 2; ++step) {
      const auto pass = [&](const Batch& batch) {
        first->zero_grad();
        second->zero_grad();
        for (const at::Tensor& loss : losses_of(batch)) loss.backward();
        return all_gradients();
      };
      const auto got = pass(share_of(step, rank));
      // The whole batch, on both ranks: a sum over all rows rather than a mean over ranks.
      auto want = pass(batch_of(100 + step, 8));
      for (at::Tensor& gradient : want) gradient.div_(2);
      expect_near(got, want);
    }
  });
}

TEST(OwnForward, AccumulatesInTheScopeOfNoSync) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net alone = seeded<Net>(1);
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group, delayed());
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      model->zero_grad();
      alone->zero_grad();
      const Batch rows = share_of(step, rank);
      {
        const auto local = ddp.no_sync();
        // A different number on each rank, since nothing is communicated.
        for (int row = 0; row <= rank.number(); ++row)
          loss_of(model, rows.rows(row, row + 1)).backward();
        const auto others = group.all_gather(model->second->bias.grad());
        EXPECT_FALSE(torch::equal(others[0], others[1]));
      }
      loss_of(model, rows.rows(1 + rank.number(), 4)).backward();
      (loss_of(alone, batch_of(100 + step, 8)) / 2).backward();
      expect_near(gradients_of(model->parameters()), gradients_of(alone->parameters()));
    }
  });
}

// Steps of two backward passes: one of ddp.forward() in no_sync(), and one of the model's own
// forward outside, which must reduce the sum of both.
void expect_reduces_after_local(bool backward_in_scope) {
  run_ranks(2, [backward_in_scope](Rank& rank) {
    const auto group = comm::init();
    Net alone = seeded<Net>(1);
    test::train(*alone, 3,
                [&](int step) { (loss_of(alone, batch_of(100 + step, 8)) / 2).backward(); });
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group, delayed());
    test::train(*model, 3, [&](int step) {
      const Batch rows = share_of(step, rank);
      at::Tensor first;
      {
        const auto local = ddp.no_sync();
        const Batch part = rows.rows(0, 2);
        first = sum_of_squares(ddp.forward(part.data), part.target);
        if (backward_in_scope) first.backward();
      }
      if (!backward_in_scope) first.backward();
      const auto others = group.all_gather(model->second->bias.grad());
      EXPECT_FALSE(torch::equal(others[0], others[1]));
      // Two passes, each of which is reduced.
      for (int row = 2; row < 4; ++row) {
        loss_of(model, rows.rows(row, row + 1)).backward();
        expect_equal_on_all_ranks(group, gradients_of(model->parameters()));
      }
    });
    expect_near(model->parameters(), alone->parameters());
    expect_equal_on_all_ranks(group, model->parameters());
  });
}

TEST(OwnForward, IsReducedAfterALocalBackwardPass) {
  expect_reduces_after_local(true);
}

TEST(OwnForward, IsReducedAfterALocalBackwardPassOutOfScope) {
  expect_reduces_after_local(false);
}

// Without delay_allreduce nothing reduces it: it must not pass for another local one.
TEST(OwnForward, IsAnErrorAfterALocalBackwardPassToo) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    const Batch rows = share_of(0, rank);
    {
      const auto local = ddp.no_sync();
      sum_of_squares(ddp.forward(rows.data), rows.target).backward();
      loss_of(model, rows).backward();
    }
    expect_error([&] { loss_of(model, rows).backward(); },
                 {"[parallel.ddp]", "a gradient for", "from another", "call ddp.forward()"});
  });
}

// torch::load gives the parameters new autograd nodes, perhaps between a forward and its backward.
TEST(OwnForward, WeightsMayBeLoadedAtAnyTime) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    std::stringstream file;
    torch::save(seeded<Net>(2), file);
    Net model = seeded<Net>(1);
    const auto load = [&] {
      file.seekg(0);
      torch::load(model, file);
    };
    const DistributedDataParallel ddp(model, group, delayed());
    Net alone = seeded<Net>(2);
    for (int step = 0; step < 3; ++step) {
      load();
      model->zero_grad();
      alone->zero_grad();
      loss_of(model, share_of(step, rank)).backward();
      (loss_of(alone, batch_of(100 + step, 8)) / 2).backward();
      expect_near(gradients_of(model->parameters()), gradients_of(alone->parameters()));
    }
    // The gradient of a bias does not depend on its value.
    model->zero_grad();
    const at::Tensor loss = (model->second->bias * (1.0 + rank.number())).sum();
    load();
    loss.backward();
    EXPECT_TRUE(torch::equal(model->second->bias.grad(), torch::full({3}, 1.5, torch::kDouble)));
  });
}

TEST(OwnForward, MayBeMixedWithTheWrappersForward) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net alone = seeded<Net>(1);
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group, delayed());
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      alone->zero_grad();
      const Batch rows = share_of(step, rank);
      const at::Tensor loss = step % 2 == 0 ? loss_of(model, rows)
                                            : sum_of_squares(ddp.forward(rows.data), rows.target);
      loss.backward();
      (loss_of(alone, batch_of(100 + step, 8)) / 2).backward();
      expect_near(gradients_of(model->parameters()), gradients_of(alone->parameters()));
    }
  });
}

TEST(OwnForward, NeedsBuffersThatEachRankKeeps) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1, true);
    {
      const DistributedDataParallel ddp(model, group, delayed());
      expect_error([&] { loss_of(model, share_of(0, rank)).backward(); },
                   {"[parallel.ddp]", "buffer 'norm.running_mean'", "broadcast_buffers(false)"});
    }
    DistributedDataParallel ddp(model, group, delayed().broadcast_buffers(false));
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      loss_of(model, share_of(step, rank)).backward();
      expect_equal_on_all_ranks(group, gradients_of(model->parameters()));
    }
    const auto means = group.all_gather(model->norm->running_mean);
    EXPECT_FALSE(torch::equal(means[0], means[1]));
  });
}

// A ddp.forward() sends the buffers for its own backward passes, not for those of later steps.
TEST(OwnForward, NeedsBuffersAlsoAfterTheWrappersForward) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1, true);
    DistributedDataParallel ddp(model, group, delayed());
    const auto wrapped = [&](int step) {
      const Batch rows = share_of(step, rank);
      return sum_of_squares(ddp.forward(rows.data), rows.target);
    };
    const auto expect_refused = [&] {
      expect_error([&] { loss_of(model, share_of(0, rank)).backward(); },
                   {"[parallel.ddp]", "buffer 'norm.running_mean'", "broadcast_buffers(false)"});
      model->zero_grad();
    };
    {
      const auto local = ddp.no_sync();
      wrapped(0).backward();
    }
    expect_refused();  // no_sync() has sent no buffers
    for (int step = 0; step < 2; ++step) {
      SCOPED_TRACE(step);
      const at::Tensor loss = wrapped(step);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();  // another pass of the same forward
      expect_equal_on_all_ranks(group, gradients_of(model->parameters()));
      {
        const torch::NoGradGuard no_grad;
        for (const at::Tensor& p : model->parameters()) p.sub_(0.01 * p.grad());
      }
      model->zero_grad();
      expect_refused();
    }
  });
}

// What ddp.forward() refuses, the backward pass refuses here.
TEST(OwnForward, RefusesParametersThatNoRankWouldSend) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    model->first->weight.requires_grad_(false);
    const DistributedDataParallel ddp(model, group, delayed());
    const auto backward = [&] { loss_of(model, share_of(0, rank)).backward(); };
    backward();
    model->first->weight.requires_grad_(true);
    expect_error(backward, {"[parallel.ddp]", "'first.weight' frozen as at construction"});
    model->first->weight.requires_grad_(false);
    backward();
    model->register_module("adapter", torch::nn::Linear(3, 3));
    expect_error(backward, {"[parallel.ddp]", "'adapter.weight', which no rank would send"});
  });
}

struct OutOfMemory : std::runtime_error {
  OutOfMemory() : runtime_error("out of memory") {}
};

// Fails in backward after the last layer has its gradients, if it is told to.
at::Tensor failing(const at::Tensor& hidden, bool fails) {
  const at::Tensor copy = hidden * 1;
  if (fails) copy.register_hook([](const at::Tensor&) { throw OutOfMemory(); });
  return copy;
}

TEST(OwnForward, CannotRepeatAStepThatThrew) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group, delayed());
    const auto backward = [&](bool fails) {
      const at::Tensor hidden = model->first->forward(share_of(0, rank).data);
      model->second->forward(failing(hidden, fails)).sum().backward();
    };
    backward(false);
    EXPECT_THROW(backward(true), OutOfMemory);
    model->zero_grad();
    expect_error([&] { backward(false); },
                 {"[parallel.ddp]", "repeated with ddp.forward()",
                  "on rank " + std::to_string(rank.number()), "resume from a checkpoint"});
  });
}

TEST(OwnForward, IsRefusedInAJoinedLoop) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group, delayed());
    expect_error([&] { ddp.join([&] { loss_of(model, share_of(0, rank)).backward(); }); },
                 {"[parallel.join]", "one backward pass for each ddp.forward()"});
    rank.meet();
  });
}

}  // namespace
}  // namespace semitone::parallel::ddp_own_forward_test
