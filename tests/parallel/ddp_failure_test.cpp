// DistributedDataParallel: misuse, exceptions in a step, and lost ranks.

#include "semitone/comm/init.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace semitone::parallel::ddp_failure_test {
namespace {

using test::all_ways;
using test::Batch;
using test::batch_of;
using test::expect_error;
using test::expect_near;
using test::gradients_of;
using test::MeanHook;
using test::Net;
using test::Rank;
using test::run_ranks;
using test::seeded;
using test::sum_of_squares;
using ::testing::HasSubstr;

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

// Its last layer exists from the first call on.
struct LazyImpl : torch::nn::Module {
  LazyImpl() : first(register_module("first", torch::nn::Linear(6, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (fc.is_empty()) fc = register_module("fc", torch::nn::Linear(3, 3));
    return fc->forward(first->forward(x));
  }
  torch::nn::Linear first;
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Lazy);

TEST(Misuse, AParameterThatComesAfterConstructionIsAnError) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Batch batch = batch_of(1, 2);
    const auto expect_refusal = [&](auto& ddp, const at::Tensor& data, const char* name) {
      expect_error([&] { ddp.forward(data); },
                   {"[parallel.ddp]", "the parameters of construction", name, "all layers exist"});
    };
    Lazy lazy;
    DistributedDataParallel of_lazy(lazy, group);
    expect_refusal(of_lazy, torch::ones({2, 6}), "'fc.weight'");

    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    {
      // The same parameter with other values.
      const torch::NoGradGuard no_grad;
      model->first->weight.set_data(model->first->weight * 2);
    }
    sum_of_squares(ddp.forward(batch.data), batch.target).backward();
    model->replace_module("second", torch::nn::Linear(8, 3));
    expect_refusal(ddp, batch.data, "'second.weight'");

    Net adapted = seeded<Net>(1);
    DistributedDataParallel of_adapted(adapted, group);
    adapted->register_module("adapter", torch::nn::Linear(2, 2));
    expect_refusal(of_adapted, batch.data, "'adapter.weight'");
    {
      const torch::NoGradGuard no_grad;
      of_adapted.forward(batch.data);
    }

    torch::jit::Module script("Scale");
    script.register_parameter("weight", torch::ones({6}).requires_grad_(), false);
    script.define("def forward(self, x):\n    return (x * self.weight).sum()\n");
    DistributedDataParallel of_script(script, group);
    script.setattr("weight", torch::ones({6}).requires_grad_());
    expect_refusal(of_script, torch::ones({6}), "'weight'");
  });
}

// Gloo would end the process.
TEST(Misuse, ABufferThatChangesItsSizeIsAnError) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const Batch batch = batch_of(1, 2);
    for (const bool broadcast : {true, false}) {
      Net model = seeded<Net>(1);
      at::Tensor counts = model->register_buffer("counts", torch::zeros({1}));
      DistributedDataParallel ddp(model, group,
                                  DistributedDataParallelOptions().broadcast_buffers(broadcast));
      counts.resize_({2 + rank.number()});
      if (broadcast) {
        expect_error(
            [&] { ddp.forward(batch.data); },
            {"[parallel.ddp]", "the buffer 'counts' to be float32[1]", "broadcast_buffers(false)"});
      } else {
        sum_of_squares(ddp.forward(batch.data), batch.target).backward();
      }
    }
  });
}

TEST(Misuse, ABroadcastOfNoTensorsOnOneRankIsNamed) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init("env://", comm::InitOptions().check(comm::CheckLevel::calls));
    std::vector<at::Tensor> tensors;
    if (rank.number() == 1) tensors.push_back(torch::ones({2}));
    EXPECT_THAT([&] { group.broadcast(tensors); },
                ::testing::ThrowsMessage<CommError>(
                    ::testing::AllOf(HasSubstr("rank 0: broadcast no tensors from rank 0"),
                                     HasSubstr("rank 1: broadcast float32[2] from rank 0"))));
  });
}

TEST(Buckets, MayBeLargerThanAllModels) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(
        model, group, DistributedDataParallelOptions().bucket_cap_mb(1e300).first_bucket_mb(1e300));
    const Batch batch = batch_of(rank.number(), 2);
    for (int step = 0; step < 2; ++step)
      sum_of_squares(ddp.forward(batch.data), batch.target).backward();
    test::expect_equal_on_all_ranks(group, gradients_of(model->parameters()));
  });
}

TEST(Misuse, OptionsThatExcludeEachOtherAreNamed) {
  expect_error([] { DistributedDataParallelOptions().bucket_cap_mb(0); }, {"bucket_cap_mb"});
  expect_error([] { DistributedDataParallelOptions().first_bucket_mb(-1); }, {"first_bucket_mb"});
  expect_error([] { DistributedDataParallelOptions().gradient_predivide_factor(std::nan("")); },
               {"gradient_predivide_factor"});
  expect_error([] { DistributedDataParallelOptions().gradient_predivide_factor(HUGE_VAL); },
               {"a finite gradient_predivide_factor above 0", "inf"});
  expect_error([] { DistributedDataParallelOptions().bucket_cap_mb(HUGE_VAL); },
               {"a finite bucket_cap_mb"});
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

TEST(Misuse, AParameterThatIsUnfrozenLaterIsAnError) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Batch batch = batch_of(1, 2);
    for (const auto& [name, options] : all_ways()) {
      SCOPED_TRACE(name);
      Net model = seeded<Net>(1);
      model->first->weight.requires_grad_(false);
      DistributedDataParallel ddp(model, group, options);
      for (int step = 0; step < 2; ++step)
        sum_of_squares(ddp.forward(batch.data), batch.target).backward();
      model->first->weight.requires_grad_(true);
      expect_error([&] { ddp.forward(batch.data); },
                   {"[parallel.ddp]", "'first.weight' frozen", "requires a gradient", "anew"});
    }
  });
}

struct OutOfMemory : std::runtime_error {
  OutOfMemory() : std::runtime_error("out of memory") {}
};

// Throws in forward, or in the backward pass between its two layers, as often as requested.
struct FragileImpl : test::NetImpl {
  FragileImpl() : NetImpl(/*normalised=*/true) {}
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor hidden = torch::tanh(norm->forward(first->forward(x)));
    fail(forward_failures);
    if (hidden.requires_grad()) {
      hidden.register_hook([this](const at::Tensor&) { fail(backward_failures); });
    }
    return second->forward(hidden);
  }
  static void fail(int& times) {
    if (times == 0) return;
    --times;
    throw OutOfMemory();
  }
  int forward_failures = 0;
  int backward_failures = 0;
};
TORCH_MODULE(Fragile);

// The means over the ranks' halves of a batch.
void expect_means(Fragile& model, Fragile& alone, const Batch& batch) {
  alone->zero_grad();
  for (int each = 0; each < 2; ++each) {
    const Batch half = batch.rows(4 * each, 4 * each + 4);
    (sum_of_squares(alone->forward(half.data), half.target) / 2).backward();
  }
  expect_near(gradients_of(model->parameters()), gradients_of(alone->parameters()));
}

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
          const Batch batch = batch_of(100 + step, 8);
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
          expect_means(model, alone, batch);
        }
      }
    }
  });
}

// An exception in the loss, or in the first node of backward, where memory often runs out. The other
// ranks wait for the gradients, not for the buffers or for another announcement of the joined loop.
TEST(Exceptions, BeforeTheFirstGradientLetAStepBeTriedAgain) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool joined : {false, true}) {
      for (const auto& [name, options] : all_ways()) {
        if (joined && options.static_graph()) continue;  // refused
        SCOPED_TRACE(name + (joined ? ", joined" : ""));
        Fragile alone = seeded<Fragile>(1);
        Fragile model = seeded<Fragile>(1);
        DistributedDataParallel ddp(model, group, options);
        const auto train = [&] {
          for (int step = 0; step < 4; ++step) {
            SCOPED_TRACE(step);
            const Batch batch = batch_of(100 + step, 8);
            const Batch rows = batch.rows(4 * rank.number(), 4 * rank.number() + 4);
            model->zero_grad();
            if (rank.number() == step % 2) {
              const at::Tensor output = ddp.forward(rows.data);
              if (step >= 2) {
                output.register_hook([](const at::Tensor&) { throw OutOfMemory(); });
                EXPECT_THROW(sum_of_squares(output, rows.target).backward(), OutOfMemory);
              }
            }
            sum_of_squares(ddp.forward(rows.data), rows.target).backward();
            expect_means(model, alone, batch);
          }
        };
        if (joined) {
          ddp.join(train);
        } else {
          train();
        }
      }
    }
  });
}

// The forward of a joined loop that accumulates: the others are told of it once.
TEST(Exceptions, InAForwardOfNoSyncLetItBeTriedAgainInAJoinedLoop) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Fragile alone = seeded<Fragile>(1);
    Fragile model = seeded<Fragile>(1);
    DistributedDataParallel ddp(model, group);
    ddp.join([&] {
      for (int step = 0; step < 4; ++step) {
        SCOPED_TRACE(step);
        const auto rows_of = [&](int batch, int of) {
          return batch_of(100 + 2 * step + batch, 8).rows(4 * of, 4 * of + 4);
        };
        const Batch first = rows_of(0, rank.number());
        const Batch second = rows_of(1, rank.number());
        model->zero_grad();
        {
          const auto local = ddp.no_sync();
          if (rank.number() == step % 2) {
            model->forward_failures = 1;
            EXPECT_THROW(ddp.forward(first.data), OutOfMemory);
          }
          sum_of_squares(ddp.forward(first.data), first.target).backward();
        }
        sum_of_squares(ddp.forward(second.data), second.target).backward();
        alone->zero_grad();
        for (const int batch : {0, 1}) {
          for (const int of : {0, 1}) {
            const Batch rows = rows_of(batch, of);
            (sum_of_squares(alone->forward(rows.data), rows.target) / 2).backward();
          }
        }
        expect_near(gradients_of(model->parameters()), gradients_of(alone->parameters()));
      }
    });
  });
}

// A hook with two messages for a bucket.
struct TwoMessages : CommHook {
  c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                 const comm::Group& group) override {
    if (fails_early) throw OutOfMemory();
    at::Tensor first = bucket.buffer.clone();
    group.all_reduce(first, comm::ReduceOp::mean);
    if (fails_midway) throw OutOfMemory();
    at::Tensor second = bucket.buffer;
    return group.all_reduce_async(second, comm::ReduceOp::mean).future();
  }
  bool fails_early = false;
  bool fails_midway = false;
};

TEST(Exceptions, OfAHookAfterItsFirstMessageAreFinal) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const Batch batch = batch_of(rank.number(), 8);
    Net model = seeded<Net>(1);
    const auto hook = std::make_shared<TwoMessages>();
    DistributedDataParallel ddp(model, group, DistributedDataParallelOptions().comm_hook(hook));
    const auto step = [&] { sum_of_squares(ddp.forward(batch.data), batch.target).backward(); };
    if (rank.number() == 0) {
      step();
      EXPECT_THROW(step(), CommError);  // rank 1 leaves
      return;
    }
    hook->fails_early = true;
    EXPECT_THROW(step(), OutOfMemory);
    hook->fails_early = false;
    model->zero_grad();
    step();
    hook->fails_midway = true;
    EXPECT_THROW(step(), OutOfMemory);
    expect_error(
        [&] { step(); },
        {"[parallel.ddp]", "on rank 1 that threw after part of its gradients had been sent"});
  });
}

// Of the same forward. The gradients of the pass that threw do not count, and those of the repeated
// one are reduced, once.
TEST(Exceptions, LetABackwardPassBeRepeatedAloneWithDelayAllreduce) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool joined : {false, true}) {
      for (const bool on_all_ranks : {true, false}) {
        SCOPED_TRACE(std::string(on_all_ranks ? "on all ranks" : "on one rank") +
                     (joined ? ", joined" : ""));
        Fragile alone = seeded<Fragile>(1);
        Fragile model = seeded<Fragile>(1);
        DistributedDataParallel ddp(model, group,
                                    DistributedDataParallelOptions().delay_allreduce(true));
        const auto train = [&] {
          for (int step = 0; step < 4; ++step) {
            SCOPED_TRACE(step);
            const Batch batch = batch_of(100 + step, 8);
            const Batch rows = batch.rows(4 * rank.number(), 4 * rank.number() + 4);
            model->zero_grad();
            const at::Tensor loss = sum_of_squares(ddp.forward(rows.data), rows.target);
            const int failures = on_all_ranks || rank.number() == step % 2 ? 1 + step / 2 : 0;
            for (int failure = 0; failure < failures; ++failure) {
              model->backward_failures = 1;
              EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), OutOfMemory);
              EXPECT_TRUE(model->second->bias.grad().defined());
              model->zero_grad();
            }
            loss.backward();
            expect_means(model, alone, batch);
          }
        };
        if (joined) {
          ddp.join(train);
        } else {
          train();
        }
      }
    }
  });
}

// The first step counts each parameter's gradients: those of a pass that threw would count too.
TEST(Exceptions, InAStaticGraphsFirstStepNeedAnotherForward) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Fragile alone = seeded<Fragile>(1);
    Fragile model = seeded<Fragile>(1);
    DistributedDataParallel ddp(model, group, DistributedDataParallelOptions().static_graph(true));
    const Batch batch = batch_of(100, 8);
    const Batch rows = batch.rows(4 * rank.number(), 4 * rank.number() + 4);
    const at::Tensor loss = sum_of_squares(ddp.forward(rows.data), rows.target);
    model->backward_failures = 1;
    EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), OutOfMemory);
    model->zero_grad();
    expect_error([&] { loss.backward({}, /*retain_graph=*/true); },
                 {"[parallel.ddp]", "another ddp.forward() after a backward pass that threw",
                  "on rank " + std::to_string(rank.number()), "delay_allreduce(true)"});
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      model->zero_grad();
      sum_of_squares(ddp.forward(rows.data), rows.target).backward();
      expect_means(model, alone, batch);
    }
  });
}

// With delay_allreduce, gradients of an earlier backward pass of the same forward have been sent.
TEST(Exceptions, InASecondBackwardPassAreNamed) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Fragile model = seeded<Fragile>(1);
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().delay_allreduce(true));
    const Batch batch = batch_of(1, 4);
    const at::Tensor output = ddp.forward(batch.data);
    output.sum().backward({}, true);
    model->backward_failures = 1;
    const at::Tensor second = output.pow(2).sum();
    EXPECT_THROW(second.backward({}, true), OutOfMemory);
    const auto expect_refusal = [&](const auto& call) {
      expect_error(call, {"[parallel.ddp]", "on rank " + std::to_string(rank.number()),
                          "threw after part of its gradients had been sent"});
    };
    expect_refusal([&] { second.backward({}, true); });
    expect_refusal([&] { ddp.forward(batch.data); });
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
}  // namespace semitone::parallel::ddp_failure_test
