// DistributedDataParallel: losses of derivatives, and activations that backward recomputes.

#include "semitone/comm/init.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/recompute/checkpoint.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::parallel::ddp_autograd_test {
namespace {

using test::all_ways;
using test::Batch;
using test::batch_of;
using test::kSumTolerance;
using test::Net;
using test::Rank;
using test::run_ranks;
using test::seeded;
using test::sum_of_squares;

// Trains `model` on this rank's half of each batch, and `alone` on both. The gradients must be
// equal in every step.
// @param loss_of  of a forward and a batch: a mean over equal halves, which depends only on the
//                 rows
template <typename Model, typename Alone, typename Forward, typename LossOf>
void expect_gradients_of_one_process(Model& model, Alone& alone, int rank, const Forward& forward,
                                     const LossOf& loss_of) {
  for (int step = 0; step < 4; ++step) {
    SCOPED_TRACE(step);
    const Batch batch = batch_of(100 + step, 8);
    model->zero_grad();
    alone->zero_grad();
    loss_of(forward, batch.rows(4 * rank, 4 * rank + 4)).backward();
    for (int each = 0; each < 2; ++each) {
      const auto one = [&](const at::Tensor& x) { return alone->forward(x); };
      (loss_of(one, batch.rows(4 * each, 4 * each + 4)) / 2).backward();
    }
    const at::NoGradGuard no_grad;
    const auto others = alone->parameters();
    for (std::size_t i = 0; i < others.size(); ++i) {
      const at::Tensor parameter = model->parameters()[i];
      if (!parameter.requires_grad()) continue;
      ASSERT_TRUE(parameter.grad().defined()) << i;
      EXPECT_TRUE(test::near(parameter.grad(), others[i].grad(), kSumTolerance)) << i;
      parameter.sub_(parameter.grad(), 0.01);
      others[i].sub_(others[i].grad(), 0.01);
    }
  }
}

// zero_grad(false) detaches gradients, which autograd refuses of views.
TEST(Gradients, MayBeClearedBetweenForwardAndBackward) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto& [name, options] : all_ways()) {
      SCOPED_TRACE(name);
      Net model = seeded<Net>(1);
      Net alone = seeded<Net>(1);
      DistributedDataParallel ddp(model, group, options);
      torch::optim::SGD optimizer(model->parameters(), 0.01);
      for (int step = 0; step < 4; ++step) {
        const Batch batch = batch_of(100 + step, 8);
        const Batch rows = batch.rows(4 * rank.number(), 4 * rank.number() + 4);
        const at::Tensor loss = sum_of_squares(ddp.forward(rows.data), rows.target);
        optimizer.zero_grad(/*set_to_none=*/false);
        loss.backward();
        alone->zero_grad();
        (sum_of_squares(alone->forward(batch.data), batch.target) / 2).backward();
        for (std::size_t i = 0; i < model->parameters().size(); ++i) {
          EXPECT_TRUE(test::near(model->parameters()[i].grad(), alone->parameters()[i].grad(),
                                 kSumTolerance))
              << step << ' ' << i;
        }
      }
    }
  });
}

// torch::autograd::grad reaches forward's results before any backward pass does.
TEST(Derivatives, InALossAreReducedAsInOneProcess) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto slopes = [](const auto& forward, const Batch& rows, bool differentiable) {
      const at::Tensor x = rows.data.detach().requires_grad_();
      const at::Tensor y = forward(x);
      const at::Tensor slope =
          torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, differentiable)[0];
      return std::pair(y, slope);
    };
    const auto penalty = [](const at::Tensor& slope) {
      return (slope.pow(2).sum(1).sqrt() - 1).pow(2).sum();
    };
    using Forward = std::function<at::Tensor(const at::Tensor&)>;
    const std::vector<
        std::pair<std::string, std::function<at::Tensor(const Forward&, const Batch&)>>>
        losses = {
            {"a penalty beside the loss",
             [&](const Forward& forward, const Batch& rows) {
               const auto [y, slope] = slopes(forward, rows, true);
               return sum_of_squares(y, rows.target) + penalty(slope);
             }},
            {"a number that is computed from it", [&](const Forward& forward, const Batch& rows) {
               const auto [y, slope] = slopes(forward, rows, false);
               return sum_of_squares(y, rows.target) * (1 + slope.abs().mean());
             }}};
    for (const auto& [name, options] : all_ways()) {
      for (const auto& [what, loss] : losses) {
        SCOPED_TRACE(name + ", " + what);
        Net model = seeded<Net>(1);
        Net alone = seeded<Net>(1);
        DistributedDataParallel ddp(model, group, options);
        expect_gradients_of_one_process(
            model, alone, rank.number(), [&](const at::Tensor& x) { return ddp.forward(x); }, loss);
      }
    }
  });
}

// A loss of derivatives only: backward never reaches forward's results.
TEST(Derivatives, MayBeTheWholeLossOfAStaticGraph) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    Net alone = seeded<Net>(1);
    for (const Net& net : {model, alone}) net->second->bias.set_requires_grad(false);
    DistributedDataParallel ddp(model, group, DistributedDataParallelOptions().static_graph(true));
    const auto loss = [](const auto& forward, const Batch& rows) {
      const at::Tensor x = rows.data.detach().requires_grad_();
      return torch::autograd::grad({forward(x).sum()}, {x}, {}, true, true)[0].pow(2).sum();
    };
    expect_gradients_of_one_process(
        model, alone, rank.number(), [&](const at::Tensor& x) { return ddp.forward(x); }, loss);
  });
}

// Runs its inner backward pass when the outer one reaches it, as activation checkpointing does.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  struct Layers : torch::CustomClassHolder {
    std::function<at::Tensor(const at::Tensor&)> forward;
  };
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const c10::intrusive_ptr<Layers>& layers) {
    context->save_for_backward({x});
    context->saved_data["layers"] = c10::IValue::make_capsule(layers);
    const at::NoGradGuard no_grad;
    return layers->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const auto layers =
        c10::static_intrusive_pointer_cast<Layers>(context->saved_data["layers"].toCapsule());
    layers->forward(x).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

struct CheckpointedImpl : test::NetImpl {
  at::Tensor forward(const at::Tensor& x) {
    auto layers = c10::make_intrusive<Checkpoint::Layers>();
    layers->forward = [this](const at::Tensor& hidden) {
      return second->forward(torch::tanh(hidden));
    };
    return Checkpoint::apply(first->forward(x), layers);
  }
};
TORCH_MODULE(Checkpointed);

TEST(StaticGraph, MayRecomputeActivations) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Checkpointed model = seeded<Checkpointed>(1);
    Checkpointed alone = seeded<Checkpointed>(1);
    DistributedDataParallel ddp(model, group, DistributedDataParallelOptions().static_graph(true));
    expect_gradients_of_one_process(
        model, alone, rank.number(), [&](const at::Tensor& x) { return ddp.forward(x); },
        [](const auto& forward, const Batch& rows) {
          return sum_of_squares(forward(rows.data), rows.target);
        });
  });
}

// The inner backward pass ends first.
TEST(DelayAllreduce, ReducesWhatABackwardPassInsideAnotherOneComputes) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Checkpointed model = seeded<Checkpointed>(1);
    Checkpointed alone = seeded<Checkpointed>(1);
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().delay_allreduce(true));
    expect_gradients_of_one_process(
        model, alone, rank.number(), [&](const at::Tensor& x) { return ddp.forward(x); },
        [](const auto& forward, const Batch& rows) {
          return sum_of_squares(forward(rows.data), rows.target);
        });
  });
}

struct NetOfCheckpointsImpl : test::NetImpl {
  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = nn::checkpoint(first, x);
    return nn::checkpoint([this](const at::Tensor& h) { return second->forward(torch::tanh(h)); },
                          hidden);
  }
};
TORCH_MODULE(NetOfCheckpoints);

TEST(Recomputation, GradientsAreThoseOfOneProcessInEveryWayOfReducing) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto& [name, options] : all_ways()) {
      SCOPED_TRACE(name);
      NetOfCheckpoints model = seeded<NetOfCheckpoints>(1);
      Net alone = seeded<Net>(1);
      DistributedDataParallel ddp(model, group, options);
      expect_gradients_of_one_process(
          model, alone, rank.number(), [&](const at::Tensor& x) { return ddp.forward(x); },
          [](const auto& forward, const Batch& rows) {
            return sum_of_squares(forward(rows.data), rows.target);
          });
    }
  });
}

}  // namespace
}  // namespace semitone::parallel::ddp_autograd_test
