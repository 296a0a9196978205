#include "semitone/parallel/distributed_data_parallel.h"

#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/comm/init.h"
#include "semitone/core/dtype.h"
#include "semitone/optim/fused_sgd.h"
#include "tests/parallel/models.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

namespace semitone::parallel {
namespace {

using test::Batch;
using test::batch_of;
using test::copies;
using test::expect_error;
using test::Heads;
using test::Net;
using test::Rank;
using test::run_ranks;
using test::seeded;
using test::sum_of_squares;
using test::train;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSteps = 20;
// fp64, 20 steps: what the order of additions may change.
constexpr double kTolerance = 1e-12;

void expect_near(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want,
                 double tolerance = kTolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(test::near(got[i], want[i], tolerance)) << "tensor " << i;
  }
}

void expect_equal_on_all_ranks(const comm::Group& group, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    for (const at::Tensor& other : group.all_gather(tensor.detach().contiguous()))
      EXPECT_TRUE(test::same_bits(other, tensor.detach()));
  }
}

std::vector<at::Tensor> gradients_of(const torch::nn::Module& model) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : model.parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

// Averages in a custom hook, as a program would.
class MeanHook final : public CommHook {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                 const comm::Group& group) override {
    std::int64_t elements = 0;
    for (const at::Tensor& parameter : bucket.parameters) elements += parameter.numel();
    EXPECT_EQ(bucket.buffer.numel(), elements);
    at::Tensor gradients = bucket.buffer;
    return group.all_reduce_async(gradients, comm::ReduceOp::mean).future();
  }
};

// Ways of reducing that must all give the same results.
std::vector<std::pair<std::string, DistributedDataParallelOptions>> all_ways() {
  return {
      {"default", DistributedDataParallelOptions()},
      {"views", DistributedDataParallelOptions().gradient_as_bucket_view(true)},
      {"small buckets",
       DistributedDataParallelOptions().bucket_cap_mb(0.0002).first_bucket_mb(0.0001)},
      {"find_unused", DistributedDataParallelOptions().find_unused_parameters(true)},
      {"find_unused, views", DistributedDataParallelOptions()
                                 .find_unused_parameters(true)
                                 .gradient_as_bucket_view(true)
                                 .bucket_cap_mb(0.0002)},
      {"static_graph", DistributedDataParallelOptions().static_graph(true)},
      {"delay_allreduce", DistributedDataParallelOptions().delay_allreduce(true)},
      {"predivide", DistributedDataParallelOptions().gradient_predivide_factor(1.5)},
      {"delayed, predivide",
       DistributedDataParallelOptions().delay_allreduce(true).gradient_predivide_factor(8)},
      {"hook", DistributedDataParallelOptions().comm_hook(std::make_shared<MeanHook>())},
  };
}

TEST(Ddp, TrainsAsOneProcessOnTheWholeBatch) {
  run_ranks(4, [](Rank& rank) {
    const auto group = comm::init();
    // The whole batch of 16 rows, in equal and unequal shares. A rank without a row takes part.
    const std::vector<std::vector<std::int64_t>> shares = {{4, 4, 4, 4}, {7, 1, 0, 8}};
    Net alone = seeded<Net>(1);
    const auto before = copies(alone->parameters());
    std::vector<at::Tensor> first_gradients;
    train(*alone, kSteps, [&](int step) {
      const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 16);
      (sum_of_squares(alone->forward(batch.data), batch.target) / 16).backward();
      if (step == 0) first_gradients = copies(gradients_of(*alone));
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
          const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 16).rows(begin, end);
          (sum_of_squares(ddp.forward(batch.data), batch.target) * 4 / 16).backward();
          if (step == 0) expect_near(gradients_of(*model), first_gradients);
        });
        expect_near(model->parameters(), alone->parameters());
        expect_equal_on_all_ranks(group, model->parameters());
      }
    }
  });
}

TEST(Ddp, AccumulatesWithoutCommunicationInNoSync) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net alone = seeded<Net>(1);
    train(*alone, 5, [&](int step) {
      const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 8);
      (sum_of_squares(alone->forward(batch.data), batch.target) / 8).backward();
    });
    for (const auto& [name, options] : all_ways()) {
      SCOPED_TRACE(name);
      Net model = seeded<Net>(1);
      DistributedDataParallel ddp(model, group, options);
      train(*model, 5, [&](int step) {
        const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 8);
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
      expect_near(gradients_of(*model), gradients_of(*alone), 1e-5);
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
        const Batch batch = batch_of(static_cast<std::uint64_t>(rank.number()), 2);
        sum_of_squares(ddp.forward(batch.data), batch.target).backward();
        expect_equal_on_all_ranks(group, gradients_of(*model));
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
      const Batch batch = batch_of(static_cast<std::uint64_t>(rank.number()), 2);
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
        const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 8);
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
        expect_near(gradients_of(*model), gradients_of(*alone));
      }
    }
  });
}

TEST(UnusedParameters, AreNamedInTheError) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool views : {false, true}) {
      Heads model = seeded<Heads>(1);
      DistributedDataParallel ddp(model, group,
                                  DistributedDataParallelOptions().gradient_as_bucket_view(views));
      const Batch batch = batch_of(1, 2);
      sum_of_squares(ddp.forward(batch.data, true), batch.target).backward();
      expect_error([&] { ddp.forward(batch.data, true); },
                   {"[parallel.ddp]", "'right.weight', 'right.bias', 'never.weight', 'never.bias'",
                    "rank " + std::to_string(rank.number()), "find_unused_parameters(true)"});
    }
  });
}

TEST(UnusedParameters, AreLeftAloneWhereNoRankUsesThem) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto use_left = [](int step, int of_rank) {
      return (step + of_rank * (step % 3)) % 2 == 0;
    };
    Heads alone = seeded<Heads>(1);
    train(*alone, kSteps, [&](int step) {
      const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 8);
      for (int each = 0; each < 2; ++each) {
        const Batch rows = batch.rows(4 * each, 4 * each + 4);
        (sum_of_squares(alone->forward(rows.data, use_left(step, each)), rows.target) / 8)
            .backward();
      }
    });
    const std::vector<DistributedDataParallelOptions> ways = {
        DistributedDataParallelOptions().find_unused_parameters(true),
        DistributedDataParallelOptions()
            .find_unused_parameters(true)
            .bucket_cap_mb(0.0003)
            .first_bucket_mb(0.0001),
        DistributedDataParallelOptions().delay_allreduce(true)};
    for (const DistributedDataParallelOptions& options : ways) {
      Heads model = seeded<Heads>(1);
      DistributedDataParallel ddp(model, group, options);
      train(*model, kSteps, [&](int step) {
        const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 8)
                                .rows(4 * rank.number(), 4 * rank.number() + 4);
        const at::Tensor output = ddp.forward(batch.data, use_left(step, rank.number()));
        (sum_of_squares(output, batch.target) * 2 / 8).backward();
        // Used by one of two ranks: the mean counts the other as zero.
        EXPECT_EQ(model->left->bias.grad().defined(), use_left(step, 0) || use_left(step, 1));
        EXPECT_FALSE(model->never->bias.grad().defined());
      });
      expect_near(model->parameters(), alone->parameters());
    }
  });
}

TEST(UnusedParameters, AreFoundOutOnceInAStaticGraph) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Heads alone = seeded<Heads>(1);
    Heads model = seeded<Heads>(1);
    DistributedDataParallel ddp(model, group, DistributedDataParallelOptions().static_graph(true));
    const auto batch = [](int step) { return batch_of(100 + static_cast<std::uint64_t>(step), 8); };
    train(*alone, 5, [&](int step) {
      (sum_of_squares(alone->forward(batch(step).data, true), batch(step).target) / 8).backward();
    });
    train(*model, 5, [&](int step) {
      const Batch rows = batch(step).rows(4 * rank.number(), 4 * rank.number() + 4);
      (sum_of_squares(ddp.forward(rows.data, true), rows.target) * 2 / 8).backward();
    });
    expect_near(model->parameters(), alone->parameters());
  });
}

// Trains `model` on this rank's half of each batch, and `alone` on both. The gradients must be
// equal in every step.
// @param loss_of  of a forward and a batch: a mean over equal halves, which depends only on the
//                 rows
template <typename Model, typename Forward, typename LossOf>
void expect_gradients_of_one_process(Model& model, Model& alone, int rank, const Forward& forward,
                                     const LossOf& loss_of) {
  for (int step = 0; step < 4; ++step) {
    SCOPED_TRACE(step);
    const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 8);
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
      EXPECT_TRUE(test::near(parameter.grad(), others[i].grad(), kTolerance)) << i;
      parameter.sub_(parameter.grad(), 0.01);
      others[i].sub_(others[i].grad(), 0.01);
    }
  }
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

TEST(StaticGraph, ThatChangesIsAnError) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Heads model = seeded<Heads>(1);
    DistributedDataParallel ddp(model, group, DistributedDataParallelOptions().static_graph(true));
    const Batch batch = batch_of(static_cast<std::uint64_t>(rank.number()), 2);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      sum_of_squares(ddp.forward(batch.data, true), batch.target).backward();
    }
    // The trunk's gradients come, the left head's do not.
    const at::Tensor output = ddp.forward(batch.data, true);
    model->trunk->forward(batch.data).sum().backward();
    expect_error([&] { ddp.forward(batch.data, true); },
                 {"[parallel.ddp]", "static_graph(true)", "fewer gradients",
                  "rank " + std::to_string(rank.number())});
  });
}

// Several results, of which a loss need not use all.
struct PairImpl : torch::nn::Module {
  PairImpl() {
    left = register_module("left", torch::nn::Linear(6, 3));
    right = register_module("right", torch::nn::Linear(6, 3));
    to(torch::kDouble);
  }
  std::pair<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x) {
    return {left->forward(x), {right->forward(x)}};
  }
  torch::nn::Linear left{nullptr}, right{nullptr};
};
TORCH_MODULE(Pair);

TEST(UnusedParameters, OfResultsThatTheLossDoesNotUseAreFine) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Pair model = seeded<Pair>(1);
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    for (int step = 0; step < 3; ++step) {
      const Batch batch = batch_of(1, 2);
      const auto [left, right] = ddp.forward(batch.data);
      sum_of_squares(step == 1 ? right.at(0) : left, batch.target).backward();
    }
  });
}

struct OpaqueImpl : torch::nn::Module {
  OpaqueImpl() : linear(register_module("linear", torch::nn::Linear(6, 3))) { to(torch::kDouble); }
  class Result {
   public:
    explicit Result(at::Tensor result) : value(std::move(result)) {}
    at::Tensor value;

   private:
    std::string name_ = "hides its fields";
  };
  Result forward(const at::Tensor& x) { return Result(linear->forward(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Opaque);

// Two results, of which a step uses one.
struct BothHeads : torch::nn::Module {
  BothHeads() {
    left = register_module("left", torch::nn::Linear(6, 3));
    right = register_module("right", torch::nn::Linear(6, 3));
    to(torch::kDouble);
  }
  struct Result {
    at::Tensor left;
    at::Tensor right;
  };
  Result forward(const at::Tensor& x) { return {left(x), right(x)}; }
  torch::nn::Linear left{nullptr}, right{nullptr};
};

TEST(Results, InStructsAreSearched) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    torch::manual_seed(1);
    const auto model = std::make_shared<BothHeads>();
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    const Batch batch = batch_of(1, 2);
    for (int step = 0; step < 3; ++step) {
      const auto result = ddp.forward(batch.data);
      sum_of_squares(step == 1 ? result.right : result.left, batch.target).backward();
    }
    EXPECT_TRUE(model->left->weight.grad().defined());
    EXPECT_TRUE(model->right->weight.grad().defined());
  });
}

// As in LibTorch's own examples: struct Net : torch::nn::Module, and an object of it.
TEST(Models, ThatAreObjectsAreTakenByReference) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::manual_seed(1);
    BothHeads alone;
    const Batch whole = batch_of(1, 4);
    sum_of_squares(alone.forward(whole.data).left, whole.target).div(2).backward();
    torch::manual_seed(1 + static_cast<std::uint64_t>(rank.number()));
    BothHeads model;
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    EXPECT_EQ(&ddp.module(), &model);
    const auto mine = torch::arange(2) + 2 * rank.number();
    sum_of_squares(ddp.forward(whole.data.index_select(0, mine)).left,
                   whole.target.index_select(0, mine))
        .backward();
    expect_near({model.left->weight.grad()}, {alone.left->weight.grad()});
  });
}

TEST(Results, OfAnyTypePassThrough) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Batch batch = batch_of(1, 2);
    Opaque model = seeded<Opaque>(1);
    {
      DistributedDataParallel ddp(model, group);
      sum_of_squares(ddp.forward(batch.data).value, batch.target).backward();
    }
    // It cannot be searched.
    DistributedDataParallel searching(
        model, group, DistributedDataParallelOptions().find_unused_parameters(true));
    expect_error([&] { searching.forward(batch.data); }, {"[parallel.ddp]", "map_tensors"});
  });
}

TEST(Models, ThatDifferAreNamedOnEveryRank) {
  run_ranks(4, [](Rank& rank) {
    const auto group = comm::init();
    const bool odd = rank.number() == 2;
    const auto error_of = [&](const torch::nn::Sequential& model,
                              const DistributedDataParallelOptions& options = {}) {
      return test::error_of([&] { DistributedDataParallel ddp(model, group, options); });
    };
    using torch::nn::Linear;
    using torch::nn::Sequential;
    const auto got = [](const std::string& text) {
      return AllOf(HasSubstr("[parallel.ddp]"), HasSubstr("on rank 2: " + text));
    };
    EXPECT_THAT(error_of(Sequential(Linear(2, 3), Linear(3, odd ? 5 : 4))),
                got("parameter '1.weight' is float32[5, 3], on rank 0 float32[4, 3]"));
    EXPECT_THAT(error_of(odd ? Sequential(Linear(2, 3)) : Sequential(Linear(2, 3), Linear(3, 4))),
                got("no parameter '1.weight'"));
    EXPECT_THAT(error_of(odd ? Sequential(Linear(2, 3), Linear(3, 4)) : Sequential(Linear(2, 3))),
                got("parameter '1.weight', which rank 0 does not have"));
    Sequential half(Linear(2, 3));
    if (odd) half->to(torch::kHalf);
    EXPECT_THAT(error_of(half), got("parameter '0.weight' is float16[3, 2]"));
    Sequential frozen(Linear(2, 3), Linear(3, 3));
    if (odd) frozen->parameters()[0].requires_grad_(false);
    EXPECT_THAT(error_of(frozen), got("parameter '0.weight' is float32[3, 2] without gradient"));
    Sequential all_frozen(Linear(2, 3));
    if (odd) {
      for (const at::Tensor& parameter : all_frozen->parameters())
        parameter.set_requires_grad(false);
    }
    EXPECT_THAT(error_of(all_frozen), got("no parameter that needs a gradient"));
    EXPECT_THAT(error_of(Sequential(Linear(2, 3)),
                         DistributedDataParallelOptions().bucket_cap_mb(odd ? 5 : 25)),
                got("the option bucket_cap_mb is 5, on rank 0 25"));
    // The group is still usable.
    Sequential good(Linear(2, 3));
    DistributedDataParallel ddp(good, group);
    ddp.forward(torch::ones({1, 2})).sum().backward();
  });
}

TEST(Models, ThatLieInMemoryInOtherWaysAreNamed) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::nn::Sequential model(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4));
    if (rank.number() == 1) {
      for (at::Tensor& parameter : model->parameters()) {
        if (parameter.dim() == 4)
          parameter.set_data(parameter.detach().contiguous(at::MemoryFormat::ChannelsLast));
      }
    }
    expect_error([&] { DistributedDataParallel<torch::nn::Sequential> ddp(model, group); },
                 {"on rank 1", "'0.weight' is float32[4, 3, 3, 3] with strides [27, 1, 9, 3]",
                  "on rank 0 float32[4, 3, 3, 3]"});
    // But not strides of dimensions of extent 1, which have no meaning.
    torch::nn::Sequential other(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, {1, 2})));
    const at::Tensor weight = other->parameters()[0];
    const std::int64_t any = rank.number() == 1 ? 6 : 77;
    other->parameters()[0].set_data(
        at::empty({6 * 77}).as_strided({4, 3, 1, 2}, {6, 1, any, 3}).copy_(weight));
    DistributedDataParallel<torch::nn::Sequential> ddp(other, group);
  });
}

TEST(Models, ThatAreCastAfterwardsAreNamed) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    model->to(torch::kFloat);
    expect_error([&] { ddp.forward(torch::ones({1, 6})); },
                 {"'first.weight'", "float64", "float32", "cast and move the model first"});
  });
}

TEST(Models, WithTiedSparseAndFrozenParametersTrainAsOneProcess) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      sparse = register_module(
          "sparse", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 4).sparse(true)));
      table = register_module("table", torch::nn::Embedding(7, 4));
      register_parameter("tied", table->weight);
      frozen = register_parameter("frozen", torch::ones({4}), false);
      to(torch::kDouble);
    }
    at::Tensor forward(const at::Tensor& words) {
      return torch::linear(table->forward(words) * frozen + sparse->forward(words % 5),
                           table->weight);
    }
    torch::nn::Embedding sparse{nullptr}, table{nullptr};
    at::Tensor frozen;
  };
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const at::Tensor words = torch::arange(8) % 7;
    const auto loss = [](const at::Tensor& output) { return output.pow(2).sum() / 8; };
    torch::manual_seed(1);
    const auto alone = std::make_shared<TiedImpl>();
    torch::manual_seed(1);
    const auto model = std::make_shared<TiedImpl>();
    DistributedDataParallel ddp(model, group);
    for (int step = 0; step < 4; ++step) {
      alone->zero_grad();
      model->zero_grad();
      loss(alone->forward(words)).backward();
      (loss(ddp.forward(words.slice(0, 4 * rank.number(), 4 * rank.number() + 4))) * 2).backward();
      EXPECT_TRUE(model->sparse->weight.grad().is_sparse());
      EXPECT_TRUE(test::near(model->sparse->weight.grad().to_dense(),
                             alone->sparse->weight.grad().to_dense(), kTolerance));
      EXPECT_TRUE(test::near(model->table->weight.grad(), alone->table->weight.grad(), kTolerance));
      EXPECT_FALSE(model->frozen.grad().defined());
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
        const auto rows = [&](int step, int of) {
          return batch_of(static_cast<std::uint64_t>(10 * step + of), 4);
        };
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

TEST(Misuse, ForwardOfTheModelItselfIsAnErrorInBackward) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    const Batch batch = batch_of(1, 2);
    const auto expect_refusal = [&](const at::Tensor& loss) {
      expect_error([&] { loss.backward({}, true); }, {"[parallel.ddp]", "ddp.forward()"});
      model->zero_grad();
    };
    expect_refusal(sum_of_squares(ddp->forward(batch.data), batch.target));
    const at::Tensor loss = sum_of_squares(ddp.forward(batch.data), batch.target);
    loss.backward({}, true);
    // No rank would reduce it.
    expect_refusal(loss);
    // A step without backward is harmless, and several backward passes in a row make one.
    ddp.forward(batch.data);
    const at::Tensor left = ddp.forward(batch.data).sum();
    left.backward();
    expect_refusal(left.detach() + model->second->bias.sum());
    // Except where gradients stay local.
    const auto local = ddp.no_sync();
    model->second->bias.sum().backward();
  });
}

TEST(Misuse, ABackwardPassOfBothKindsOfForwardsIsAnError) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Batch batch = batch_of(1, 2);
    for (const auto& [name, options] : all_ways()) {
      SCOPED_TRACE(name);
      Net model = seeded<Net>(1);
      DistributedDataParallel ddp(model, group, options);
      const at::Tensor reduced = ddp.forward(batch.data).sum();
      const at::Tensor local = [&] {
        const auto scope = ddp.no_sync();
        return ddp.forward(batch.data).sum();
      }();
      expect_error([&] { (reduced + local).backward(); },
                   {"[parallel.ddp]", "before forwards in no_sync()", "NoGradGuard"});
    }
  });
}

TEST(Misuse, ABackwardAfterItsEndIsAnError) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    const Batch batch = batch_of(1, 2);
    const auto loss = [&] {
      DistributedDataParallel ddp(model, group,
                                  DistributedDataParallelOptions().find_unused_parameters(true));
      return sum_of_squares(ddp.forward(batch.data), batch.target);
    }();
    test::expect_error([&] { loss.backward(); }, {"[parallel.ddp]", "to exist until"});
  });
}

TEST(Misuse, OptionsThatExcludeEachOtherAreNamed) {
  expect_error([] { DistributedDataParallelOptions().bucket_cap_mb(0); }, {"bucket_cap_mb"});
  expect_error([] { DistributedDataParallelOptions().first_bucket_mb(-1); }, {"first_bucket_mb"});
  expect_error([] { DistributedDataParallelOptions().gradient_predivide_factor(NAN); },
               {"gradient_predivide_factor"});
  expect_error([] { DistributedDataParallelOptions().compress(torch::kFloat); },
               {"compress", "float32"});
  Net model;
  const auto expect_excluded = [&](const DistributedDataParallelOptions& options, const char* one,
                                   const char* other) {
    expect_error([&] { DistributedDataParallel ddp(model, comm::Group(), options); }, {one, other});
  };
  const auto hook = std::make_shared<MeanHook>();
  expect_excluded(
      DistributedDataParallelOptions().delay_allreduce(true).find_unused_parameters(true),
      "delay_allreduce", "find_unused_parameters");
  expect_excluded(DistributedDataParallelOptions().delay_allreduce(true).static_graph(true),
                  "delay_allreduce", "static_graph");
  expect_excluded(
      DistributedDataParallelOptions().delay_allreduce(true).gradient_as_bucket_view(true),
      "delay_allreduce", "gradient_as_bucket_view");
  expect_excluded(DistributedDataParallelOptions().delay_allreduce(true).comm_hook(hook),
                  "delay_allreduce", "comm_hook");
  expect_excluded(DistributedDataParallelOptions().compress(torch::kHalf).comm_hook(hook),
                  "compress", "comm_hook");
  expect_excluded(DistributedDataParallelOptions().allreduce_always_fp32(true).comm_hook(hook),
                  "allreduce_always_fp32", "comm_hook");
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

// Writes a file when the group has received a bucket.
class NotingHook final : public CommHook {
 public:
  explicit NotingHook(std::filesystem::path file) : file_(std::move(file)) {}

  c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                 const comm::Group& group) override {
    at::Tensor gradients = bucket.buffer;
    const auto future = group.all_reduce_async(gradients).future();
    std::ofstream(file_) << "under way";
    return future;
  }

 private:
  const std::filesystem::path file_;
};

TEST(CommHook, GoesOnWhileOtherRanksAreLate) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    const auto file = rank.folder() / ("rank" + std::to_string(rank.number()));
    DistributedDataParallel ddp(
        model, group,
        DistributedDataParallelOptions().comm_hook(std::make_shared<NotingHook>(file)));
    const at::Tensor loss = ddp.forward(batch_of(1, 2).data).sum();
    if (rank.number() == 1) {
      const auto first = rank.folder() / "rank0";
      EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(first); }));
    }
    loss.backward();
  });
}

TEST(CommHook, MayGiveAnythingThatFits) {
  struct Zeros final : CommHook {
    c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                   const comm::Group&) override {
      buckets.push_back(bucket.index);
      last = bucket.is_last;
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(torch::zeros_like(bucket.buffer));
      return future;
    }
    std::vector<std::size_t> buckets;
    bool last = false;
  };
  struct Throws final : CommHook {
    c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket&,
                                                   const comm::Group&) override {
      throw std::runtime_error("a hook of no use");
    }
  };
  struct Misfit final : CommHook {
    c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket&,
                                                   const comm::Group&) override {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(torch::zeros({1}));
      return future;
    }
  };
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Batch batch = batch_of(1, 2);
    const auto backward_with = [&](const std::shared_ptr<CommHook>& hook, int passes) {
      Net model = seeded<Net>(1);
      DistributedDataParallel ddp(
          model, group,
          DistributedDataParallelOptions().comm_hook(hook).bucket_cap_mb(0.0002).first_bucket_mb(
              0.0001));
      for (int pass = 0; pass < passes; ++pass)
        sum_of_squares(ddp.forward(batch.data), batch.target).backward();
      return copies(gradients_of(*model));
    };
    const auto zeros = std::make_shared<Zeros>();
    for (const at::Tensor& gradient : backward_with(zeros, 2)) {
      EXPECT_TRUE(torch::equal(gradient, torch::zeros_like(gradient)));
    }
    // One bucket to determine the order, then small ones.
    EXPECT_THAT(zeros->buckets, ::testing::ElementsAre(0, 0, 1));
    EXPECT_TRUE(zeros->last);
    EXPECT_THAT([&] { backward_with(std::make_shared<Throws>(), 1); },
                ::testing::ThrowsMessage<std::runtime_error>(HasSubstr("a hook of no use")));
    expect_error([&] { backward_with(std::make_shared<Misfit>(), 1); },
                 {"[parallel.comm_hook]", "float64[", "got float32[1]"});
  });
}

// The mean gradient of a one-layer model whose gradients are the input, on every rank.
std::vector<at::Tensor> mean_of_inputs(const comm::Group& group, const at::Tensor& input,
                                       at::ScalarType dtype,
                                       const DistributedDataParallelOptions& options) {
  torch::nn::Linear model(torch::nn::LinearOptions(input.size(0), 1).bias(false));
  model->to(dtype);
  DistributedDataParallel ddp(model, group, options);
  ddp.forward(input.to(dtype).view({1, -1})).sum().backward();
  return {model->weight.grad().view(-1)};
}

TEST(Compression, RoundsToTheDtypeOnly) {
  run_ranks(4, [](Rank& rank) {
    const auto group = comm::init();
    torch::manual_seed(7);
    const at::Tensor inputs = torch::randn({4, 1000}, torch::kDouble);
    const at::Tensor input = inputs[rank.number()];
    const at::Tensor mean = inputs.mean(0);
    const double scale = inputs.abs().max().item<double>();
    for (const auto wire : {torch::kHalf, torch::kBFloat16}) {
      for (const auto dtype : {torch::kFloat, torch::kDouble}) {
        for (const bool delayed : {false, true}) {
          const auto options =
              DistributedDataParallelOptions().compress(wire).delay_allreduce(delayed);
          const at::Tensor got = mean_of_inputs(group, input, dtype, options)[0];
          EXPECT_EQ(got.scalar_type(), dtype);
          // Each rank's value is rounded once, and each of three sums.
          const double most = 4 * dtype_limits(wire).epsilon / 2 * scale;
          EXPECT_LE((got - mean).abs().max().item<double>(), most);
          EXPECT_GT((got - mean).abs().max().item<double>(), 0) << "something was compressed";
          expect_equal_on_all_ranks(group, {got});
        }
      }
    }
    // 16-bit gradients need none.
    const at::Tensor half =
        mean_of_inputs(group, torch::ones({4}), torch::kHalf,
                       DistributedDataParallelOptions().compress(torch::kBFloat16))[0];
    EXPECT_TRUE(test::same_bits(half, torch::ones({4}, torch::kHalf)));
  });
}

TEST(Compression, DividesBeforeAndAfterTheSum) {
  run_ranks(4, [](Rank&) {
    const auto group = comm::init();
    const auto mean = [&](double value, const DistributedDataParallelOptions& options,
                          at::ScalarType dtype = torch::kFloat) {
      return mean_of_inputs(group, torch::full({4}, value), dtype, options)[0][0].item<double>();
    };
    const auto half = DistributedDataParallelOptions().compress(torch::kHalf);
    // The sum of four in fp16, of values divided by 2: 4 * 32752 / 2 is its largest.
    EXPECT_EQ(mean(32752, half), 32752);
    EXPECT_TRUE(std::isinf(mean(40000, half)));
    // fp16's smallest is 2^-24: divided by 2 once, not by 4.
    EXPECT_EQ(mean(std::ldexp(1, -23), half), std::ldexp(1, -23));
    EXPECT_EQ(
        mean(std::ldexp(1, -23), DistributedDataParallelOptions(half).gradient_predivide_factor(4)),
        0);
    EXPECT_EQ(mean(60000, DistributedDataParallelOptions(half).gradient_predivide_factor(4)),
              60000);
    // fp16 gradients summed in fp32.
    const auto wide =
        DistributedDataParallelOptions().allreduce_always_fp32(true).gradient_predivide_factor(1);
    EXPECT_EQ(mean(60000, wide, torch::kHalf), 60000);
    EXPECT_TRUE(std::isinf(
        mean(60000, DistributedDataParallelOptions().gradient_predivide_factor(1), torch::kHalf)));
    EXPECT_TRUE(std::isinf(mean(
        60000, DistributedDataParallelOptions().gradient_predivide_factor(1).delay_allreduce(true),
        torch::kHalf)));
    EXPECT_EQ(mean(60000, DistributedDataParallelOptions(wide).delay_allreduce(true), torch::kHalf),
              60000);
  });
}

TEST(MixedPrecision, HalfParametersAndMastersStayEqualOnAllRanks) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto level : {amp::OptLevel::O1, amp::OptLevel::O2, amp::OptLevel::O3}) {
      Net model = seeded<Net>(1, true);
      model->to(torch::kFloat);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      auto mixed = amp::initialize(model, optimizer,
                                   amp::Options(level).dtype(torch::kBFloat16).loss_scale(16));
      DistributedDataParallel ddp(model, group,
                                  DistributedDataParallelOptions().allreduce_always_fp32(true));
      const Batch batch = batch_of(static_cast<std::uint64_t>(rank.number()), 8);
      double first = 0;
      double last = 0;
      for (int step = 0; step < 15; ++step) {
        const auto output = mixed.forward(ddp, batch.data.to(torch::kFloat));
        const auto loss =
            sum_of_squares(output.to(torch::kFloat), batch.target.to(torch::kFloat)) / 8;
        mixed.scale_loss(loss, optimizer).backward();
        EXPECT_EQ(mixed.step(optimizer), amp::Step::stepped);
        mixed.zero_grad(optimizer);
        (step == 0 ? first : last) = loss.item<double>();
      }
      EXPECT_LT(last, first);
      expect_equal_on_all_ranks(group, copies(mixed.master_params(optimizer)));
      expect_equal_on_all_ranks(group, copies(model->parameters()));
    }
  });
}

// 200 steps, with infs on rank 1 now and then, from other weights on each rank.
TEST(MixedPrecision, MastersFollowParametersThatAreBroadcastOneByOne) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1 + static_cast<std::uint64_t>(rank.number()));
    model->to(torch::kFloat);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    auto mixed = amp::initialize(
        *model, optimizer,
        amp::Options(amp::OptLevel::O2).dtype(torch::kBFloat16).loss_scale(1.f).verbosity(0));
    for (at::Tensor& parameter : model->parameters()) group.broadcast(parameter);
    for (const at::Tensor& parameter : model->parameters())
      parameter.mutable_grad() = torch::ones_like(parameter);
    mixed.step(optimizer);
    expect_equal_on_all_ranks(group, model->parameters());
  });
}

TEST(MixedPrecision, MastersAndScalesStayEqualThroughOverflowsOnOneRank) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto level : {amp::OptLevel::O1, amp::OptLevel::O2}) {
      for (const auto& options : {DistributedDataParallelOptions(),
                                  DistributedDataParallelOptions().compress(torch::kHalf)}) {
        Net model = seeded<Net>(1 + static_cast<std::uint64_t>(rank.number()), true);
        model->to(torch::kFloat);
        torch::optim::SGD optimizer(model->parameters(),
                                    torch::optim::SGDOptions(0.01).momentum(0.9));
        auto mixed =
            amp::initialize(model, optimizer,
                            amp::Options(level)
                                .dtype(torch::kHalf)
                                .verbosity(0)
                                .loss_scale_options(amp::LossScaleOptions().growth_interval(20)));
        DistributedDataParallel ddp(model, group, options);
        int skipped = 0;
        for (int step = 0; step < 200; ++step) {
          const Batch batch = batch_of(static_cast<std::uint64_t>(2 * step + rank.number()), 4);
          const auto output = mixed.forward(ddp, batch.data.to(torch::kFloat));
          at::Tensor loss =
              sum_of_squares(output.to(torch::kFloat), batch.target.to(torch::kFloat)) / 4;
          if (rank.number() == 1 && step % 23 == 7) loss = loss * HUGE_VAL;
          mixed.scale_loss(loss, optimizer).backward();
          if (mixed.step(optimizer) == amp::Step::skipped) ++skipped;
          mixed.zero_grad(optimizer);
        }
        EXPECT_GE(skipped, 9);  // the infs; the scale may have been too high as well
        EXPECT_EQ(mixed.skipped_steps(), skipped);
        expect_equal_on_all_ranks(group, copies(mixed.master_params(optimizer)));
        expect_equal_on_all_ranks(group, copies(model->parameters()));
        expect_equal_on_all_ranks(
            group, {torch::tensor({mixed.loss_scaler().scale(), static_cast<double>(skipped)},
                                  torch::kDouble)});
        for (const at::Tensor& master : mixed.master_params(optimizer))
          EXPECT_TRUE(master.isfinite().all().item<bool>());
      }
    }
  });
}

TEST(MixedPrecision, AccumulatesScaledGradientsInNoSync) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto gradients = [&](bool parallel) {
      Net model = seeded<Net>(1);
      model->to(torch::kFloat);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      auto mixed =
          amp::initialize(model, optimizer,
                          amp::Options(amp::OptLevel::O2).dtype(torch::kBFloat16).loss_scale(128));
      DistributedDataParallel ddp(model, parallel ? group : comm::Group());
      const auto pass = [&](int row, bool last) {
        const Batch batch = batch_of(1, 4).rows(row, row + 1);
        std::optional<NoSync> local;
        if (!last) local.emplace(ddp.no_sync());
        const auto loss = sum_of_squares(mixed.forward(ddp, batch.data.to(torch::kFloat)),
                                         batch.target.to(torch::kFloat));
        amp::ScaleLossOptions options;
        options.delay_unscale = !last;
        mixed.scale_loss(loss * (parallel ? 2 : 1), optimizer, options).backward();
      };
      for (int row = 0; row < 4; ++row) {
        if (!parallel || row / 2 == rank.number()) pass(row, parallel ? row % 2 == 1 : row == 3);
      }
      std::vector<at::Tensor> result;
      for (const at::Tensor& master : mixed.master_params(optimizer))
        result.push_back(master.grad());
      return copies(result);
    };
    expect_near(gradients(true), gradients(false), 8 * dtype_limits(torch::kBFloat16).epsilon);
  });
}

// Each pass unscales its gradients, as the documentation of both interfaces suggests.
struct Accumulation {
  std::string name;
  amp::Options amp;
  DistributedDataParallelOptions ddp;
  bool fused = false;
  bool local = true;  // all passes but the last in no_sync()
};

std::vector<Accumulation> accumulations() {
  const auto at = [](const char* level, c10::ScalarType dtype, const char* scale) {
    return amp::Options(level).dtype(dtype).verbosity(0).loss_scale(scale).loss_scale_options(
        amp::LossScaleOptions().init_scale(64));
  };
  const auto view = DistributedDataParallelOptions().gradient_as_bucket_view(true);
  const auto delayed = DistributedDataParallelOptions().delay_allreduce(true);
  std::vector<Accumulation> all;
  const auto add = [&](const std::string& name, const amp::Options& amp) {
    for (const bool fused : {false, true}) {
      for (const bool local : {true, false}) {
        const std::string how = name + (fused ? ", fused" : "") + (local ? ", no_sync" : "");
        all.push_back({how, amp, {}, fused, local});
        all.push_back({how + ", view", amp, view, fused, local});
        all.push_back({how + ", delayed", amp, delayed, fused, local});
      }
    }
  };
  add("O1 fp16", at("O1", torch::kHalf, "dynamic"));
  add("O1 bf16", at("O1", torch::kBFloat16, "1"));
  add("O2 bf16", at("O2", torch::kBFloat16, "1"));
  add("O2 fp16", at("O2", torch::kHalf, "dynamic"));
  return all;
}

std::unique_ptr<torch::optim::Optimizer> sgd(const Net& model, bool fused) {
  if (fused)
    return std::make_unique<optim::FusedSGD>(model->parameters(), optim::FusedSGDOptions(0.01));
  return std::make_unique<torch::optim::SGD>(model->parameters(), 0.01);
}

TEST(MixedPrecision, AccumulatesWithoutDelayedUnscalingAsOneProcessOnTheWholeBatch) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const Accumulation& one : accumulations()) {
      SCOPED_TRACE(one.name);
      const auto dtype = amp::Properties::resolve(one.amp, torch::kCPU).dtype;
      std::vector<std::vector<at::Tensor>> gradients;
      for (const bool parallel : {true, false}) {
        Net model = seeded<Net>(1);
        model->to(torch::kFloat);
        const auto optimizer = sgd(model, one.fused);
        auto mixed = amp::initialize(model, *optimizer, one.amp);
        DistributedDataParallel ddp(model, parallel ? group : comm::Group(), one.ddp);
        const auto pass = [&](int row, bool last) {
          const Batch batch = batch_of(1, 6).rows(row, row + 1);
          std::optional<NoSync> local;
          if (!last && one.local) local.emplace(ddp.no_sync());
          const auto loss = sum_of_squares(mixed.forward(ddp, batch.data.to(torch::kFloat)),
                                           batch.target.to(torch::kFloat));
          mixed.scale_loss(loss * (parallel ? 2 : 1), *optimizer).backward();
        };
        // In the first of two steps DDP rebuilds its buckets.
        for (int step = 0; step < 2; ++step) {
          for (int row = 0; row < 6; ++row) {
            if (!parallel || row / 3 == rank.number())
              pass(row, parallel ? row % 3 == 2 : row == 5);
          }
          std::vector<at::Tensor> result;
          for (const at::Tensor& master : mixed.master_params(*optimizer))
            result.push_back(master.grad());
          if (step == 0) {
            gradients.push_back(copies(result));
          }
          EXPECT_EQ(mixed.step(*optimizer), amp::Step::stepped);
          optimizer->zero_grad();
        }
        if (parallel) {
          expect_equal_on_all_ranks(group, copies(mixed.master_params(*optimizer)));
          expect_equal_on_all_ranks(group, copies(model->parameters()));
        }
      }
      expect_near(gradients[0], gradients[1], 8 * dtype_limits(dtype).epsilon);
    }
  });
}

TEST(MixedPrecision, LocalGradientsAreScaledAsTheLossThatFollows) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto level : {"O1", "O2"}) {
      SCOPED_TRACE(level);
      std::vector<std::vector<at::Tensor>> gradients;
      for (const bool parallel : {true, false}) {
        Net model = seeded<Net>(1);
        model->to(torch::kFloat);
        const auto optimizer = sgd(model, false);
        auto mixed = amp::initialize(
            model, *optimizer,
            amp::Options(level)
                .dtype(torch::kHalf)
                .verbosity(0)
                .num_losses(2)
                .loss_scale_options(amp::LossScaleOptions().init_scale(64).growth_interval(1)));
        DistributedDataParallel ddp(model, parallel ? group : comm::Group());
        const auto pass = [&](int row, bool last) {
          const Batch batch = batch_of(1, 4).rows(row, row + 1);
          std::optional<NoSync> local;
          if (!last) local.emplace(ddp.no_sync());
          const auto loss = sum_of_squares(mixed.forward(ddp, batch.data.to(torch::kFloat)),
                                           batch.target.to(torch::kFloat));
          mixed.scale_loss(loss * (parallel ? 2 : 1), *optimizer, {.loss_id = last ? 1 : 0})
              .backward();
          // Gradients before the last pass may be inspected: they are unscaled.
          for (const at::Tensor& master : mixed.master_params(*optimizer))
            EXPECT_LT(master.grad().abs().max().item<double>(), 1000);
        };
        for (int row = 0; row < 4; ++row) {
          if (!parallel || row / 2 == rank.number()) pass(row, parallel ? row % 2 == 1 : row == 3);
        }
        std::vector<at::Tensor> result;
        for (const at::Tensor& master : mixed.master_params(*optimizer))
          result.push_back(master.grad());
        gradients.push_back(copies(result));
        EXPECT_EQ(mixed.step(*optimizer), amp::Step::stepped);
        EXPECT_EQ(mixed.loss_scaler(0).scale(), 128);
        EXPECT_EQ(mixed.loss_scaler(1).scale(), 128);
        // If a rank keeps its own gradients permanently, it steps with them.
        if (parallel) {
          mixed.zero_grad(*optimizer);
          pass(rank.number(), false);
          EXPECT_EQ(mixed.step(*optimizer), amp::Step::stepped);
        }
      }
      expect_near(gradients[0], gradients[1], 8 * dtype_limits(torch::kHalf).epsilon);
    }
  });
}

TEST(MixedPrecision, AnOverflowInNoSyncSkipsTheStepOnAllRanks) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto level : {"O1", "O2"}) {
      SCOPED_TRACE(level);
      Net model = seeded<Net>(1);
      model->to(torch::kFloat);
      const auto optimizer = sgd(model, false);
      auto mixed =
          amp::initialize(model, *optimizer, amp::Options(level).dtype(torch::kHalf).verbosity(0));
      DistributedDataParallel ddp(model, group);
      const auto before = copies(mixed.master_params(*optimizer));
      {
        const auto local = ddp.no_sync();
        const double factor = rank.number() == 1 ? HUGE_VAL : 1e-6;
        mixed.scale_loss(mixed.forward(ddp, torch::ones({2, 6})).sum() * factor, *optimizer)
            .backward();
      }
      mixed.scale_loss(mixed.forward(ddp, torch::ones({2, 6})).sum() * 1e-6, *optimizer).backward();
      EXPECT_EQ(mixed.step(*optimizer), amp::Step::skipped);
      expect_near(copies(mixed.master_params(*optimizer)), before, 0);
      EXPECT_EQ(mixed.loss_scaler().scale(), 32768);
    }
  });
}

TEST(MixedPrecision, AnOverflowOnOneRankSkipsTheStepOnAll) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto& options : {DistributedDataParallelOptions(),
                                DistributedDataParallelOptions().compress(torch::kHalf)}) {
      Net model = seeded<Net>(1);
      model->to(torch::kFloat);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      amp::GradScaler scaler;
      DistributedDataParallel ddp(model, group, options);
      const auto before = copies(model->parameters());
      const auto loss = [&] {
        const amp::Autocast region(torch::kCPU, torch::kBFloat16);
        return ddp.forward(torch::ones({2, 6})).sum();
      }();
      scaler.scale(loss * (rank.number() == 1 ? HUGE_VAL : 1.0)).backward();
      EXPECT_EQ(scaler.step(optimizer), amp::Step::skipped);
      scaler.update();
      expect_near(model->parameters(), before, 0);
      EXPECT_EQ(scaler.get_scale(), 32768);
    }
  });
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

// ---- exceptions ---------------------------------------------------------------------------------

struct OutOfMemory : std::runtime_error {
  OutOfMemory() : std::runtime_error("out of memory") {}
};

// Throws in forward, or in the backward pass between its two layers, as often as requested.
struct FragileImpl : test::NetImpl {
  FragileImpl() : NetImpl(/*normalised=*/true) {}
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor hidden = torch::tanh(norm->forward(first->forward(x)));
    if (forward_failures > 0 && forward_failures-- > 0) throw OutOfMemory();
    if (hidden.requires_grad()) {
      hidden.register_hook([this](const at::Tensor&) {
        if (backward_failures > 0 && backward_failures-- > 0) throw OutOfMemory();
      });
    }
    return second->forward(hidden);
  }
  int forward_failures = 0;
  int backward_failures = 0;
};
TORCH_MODULE(Fragile);

// A rank that repeats a step is still in the same one: nothing is sent twice, and the other ranks,
// which wait for its gradients, get them.
TEST(Exceptions, LetAStepBeTriedAgain) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool on_all_ranks : {true, false}) {
      for (const auto& [name, options] : all_ways()) {
        if (name.find("small") != std::string::npos || name == "find_unused, views")
          continue;  // see below
        SCOPED_TRACE(name + (on_all_ranks ? ", on all ranks" : ", on one rank"));
        Fragile alone = seeded<Fragile>(1);
        Fragile model = seeded<Fragile>(1);
        DistributedDataParallel ddp(model, group, options);
        for (int step = 0; step < 5; ++step) {
          SCOPED_TRACE(step);
          const Batch batch = batch_of(100 + static_cast<std::uint64_t>(step), 8);
          const Batch rows = batch.rows(4 * rank.number(), 4 * rank.number() + 4);
          const bool fails = step != 2 && (on_all_ranks || rank.number() == step % 2);
          if (fails) model->backward_failures = step == 4 ? 2 : 1;
          if (fails && step == 3) model->forward_failures = 1;
          int attempts = 0;
          for (bool done = false; !done;) {
            ++attempts;
            model->zero_grad();
            try {
              sum_of_squares(ddp.forward(rows.data), rows.target).backward();
              done = true;
            } catch (const OutOfMemory&) {
            }
          }
          EXPECT_EQ(attempts, !fails ? 1 : step < 3 ? 2 : 3);
          alone->zero_grad();
          for (int each = 0; each < 2; ++each) {
            const Batch half = batch.rows(4 * each, 4 * each + 4);
            (sum_of_squares(alone->forward(half.data), half.target) / 2).backward();
          }
          expect_near(gradients_of(*model), gradients_of(*alone));
        }
      }
    }
  });
}

// Gradients that the second layer sent cannot be withdrawn.
TEST(Exceptions, AfterPartOfTheGradientsWereSentAreNamed) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const std::string number = std::to_string(rank.number());
    for (const bool searches : {false, true}) {
      Fragile model = seeded<Fragile>(1);
      DistributedDataParallel ddp(model, group,
                                  DistributedDataParallelOptions()
                                      .bucket_cap_mb(0.0002)
                                      .first_bucket_mb(0.0001)
                                      .find_unused_parameters(searches));
      const Batch batch = batch_of(1, 4);
      for (int step = 0; step < 3; ++step) {
        if (step == 2) model->backward_failures = 1;
        const at::Tensor loss = sum_of_squares(ddp.forward(batch.data), batch.target);
        if (step < 2) {
          loss.backward();
        } else {
          EXPECT_THROW(loss.backward(), OutOfMemory);
        }
      }
      for (int again = 0; again < 2; ++again) {
        expect_error([&] { ddp.forward(batch.data); },
                     {"[parallel.ddp]", "end without an exception", "on rank " + number,
                      "threw after part of its gradients had been sent", "checkpoint"});
      }
    }
  });
}

// ---- lost ranks --------------------------------------------------------------------------------

class LostInBackward : public ::testing::TestWithParam<int> {};

TEST_P(LostInBackward, IsNamedByAllOthers) {
  const int signal = GetParam();
  test::RankOptions options;
  options.casualties = {1};
  const auto results = run_ranks(
      4,
      [&](Rank& rank) {
        const auto group = comm::init("env://", comm::InitOptions()
                                                    .heartbeat(std::chrono::milliseconds(50))
                                                    .heartbeat_timeout(std::chrono::seconds(3)));
        Net model = seeded<Net>(1);
        DistributedDataParallel ddp(
            model, group,
            DistributedDataParallelOptions().bucket_cap_mb(0.0002).first_bucket_mb(0.0001));
        const Batch batch = batch_of(1, 2);
        try {
          for (int step = 0;; ++step) {
            const at::Tensor output = ddp.forward(batch.data);
            if (rank.number() == 1 && step == 3) {
              // When the gradients of the second layer are being sent, and the first's are not yet.
              model->first->bias.register_hook([&](const at::Tensor&) { std::raise(signal); });
            }
            sum_of_squares(output, batch.target).backward();
          }
        } catch (const CommError& error) {
          EXPECT_EQ(error.ranks(), std::vector<int>{1});
          rank.report(error.what());
        }
      },
      options);
  for (const int rank : {0, 2, 3}) {
    const auto& result = results[static_cast<std::size_t>(rank)];
    ASSERT_EQ(result.reports.size(), 1u) << result.output;
    EXPECT_THAT(result.reports[0], HasSubstr("rank 1 lost"));
  }
}

INSTANTIATE_TEST_SUITE_P(Each, LostInBackward, ::testing::Values(SIGKILL, SIGSTOP));

TEST(Loss, OfARankThatThrowsIsNamedToo) {
  const auto results = run_ranks(2, [](Rank& rank) {
    try {
      const auto group = comm::init();
      Net model = seeded<Net>(1);
      DistributedDataParallel ddp(model, group);
      const Batch batch = batch_of(1, 2);
      if (rank.number() == 1) throw std::logic_error("mine");
      sum_of_squares(ddp.forward(batch.data), batch.target).backward();
      ADD_FAILURE();
    } catch (const CommError& error) {
      rank.report(error.what());
    } catch (const std::logic_error&) {
    }
  });
  ASSERT_EQ(results[0].reports.size(), 1u);
  EXPECT_THAT(results[0].reports[0], HasSubstr("rank 1 lost: left the group"));
}

}  // namespace
}  // namespace semitone::parallel
