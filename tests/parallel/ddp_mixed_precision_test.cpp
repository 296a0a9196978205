// DistributedDataParallel with an opt level or a GradScaler: masters, scales and overflows on all
// ranks.

#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/comm/init.h"
#include "semitone/core/dtype.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "src/core/dtype_limits.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace semitone::parallel::ddp_mixed_precision_test {
namespace {

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
      const Batch batch = batch_of(rank.number(), 8);
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

// With a hook, ranks with other batches have the same scales in fp8; without, only the weights'.
TEST(MixedPrecision, RanksAgreeOnTheScalesOfFp8) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool agrees : {true, false}) {
      Net model = seeded<Net>(1);
      model->to(torch::kFloat);
      torch::optim::SGD optimizer(model->parameters(), 0.01);
      auto mixed = amp::initialize(
          model, optimizer,
          amp::Options().dtype(torch::kBFloat16).policy(amp::CastPolicy::semitone().fp8()));
      if (agrees) {
        mixed.fp8_scaling().set_amax_hook(
            [&](at::Tensor& amax) { group.all_reduce(amax, comm::ReduceOp::max); });
      }
      DistributedDataParallel ddp(model, group);
      float largest = 0;
      for (int step = 0; step < 3; ++step) {
        const Batch batch = batch_of(rank.number() + 3 * step, 8);
        const auto data = batch.data.to(torch::kFloat) * (rank.number() + 1);
        largest = std::max(largest, data.abs().max().item<float>());
        const auto output = mixed.forward(ddp, data);
        const auto loss =
            sum_of_squares(output.to(torch::kFloat), batch.target.to(torch::kFloat)) / 8;
        mixed.scale_loss(loss, optimizer).backward();
        EXPECT_EQ(mixed.step(optimizer), amp::Step::stepped);
        mixed.zero_grad(optimizer);
      }
      at::Tensor expected = torch::tensor({largest});
      group.all_reduce(expected, comm::ReduceOp::max);
      const auto scales = mixed.fp8_scaling().scales();
      ASSERT_FALSE(scales.empty());
      std::vector<at::Tensor> of_weights;
      std::vector<at::Tensor> of_inputs;
      for (const auto& one : scales) {
        of_weights.push_back(torch::tensor({one.weight_scale}));
        of_inputs.push_back(torch::tensor({one.input_scale, one.grad_output_scale}));
      }
      expect_equal_on_all_ranks(group, of_weights);
      expect_equal_on_all_ranks(group, copies(model->parameters()));
      if (agrees) {
        expect_equal_on_all_ranks(group, of_inputs);
        EXPECT_FLOAT_EQ(scales.front().input_scale, 448 / expected.item<float>());
      } else {
        EXPECT_FLOAT_EQ(scales.front().input_scale, 448 / largest);
      }
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
        amp::Options(amp::OptLevel::O2).dtype(torch::kBFloat16).loss_scale(1.0).verbosity(0));
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
          const Batch batch = batch_of(2 * step + rank.number(), 4);
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
        options.delay_unscale(!last);
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

// A new bucket would take over the fp32 gradient of the first pass, as 0.
TEST(MixedPrecision, NewBucketsLeaveTheGradientsOfMastersInFp32) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    auto mixed = amp::initialize(
        net, optimizer, amp::Options("O2").dtype(torch::kHalf).loss_scale(65536.0).verbosity(0));
    DistributedDataParallel ddp(net, group,
                                DistributedDataParallelOptions().gradient_as_bucket_view(true));
    for (int pass = 1; pass <= 3; ++pass) {
      const at::Tensor output = mixed.forward(ddp, torch::ones({1, 1})).to(torch::kFloat);
      mixed.scale_loss(output.sum() * 1e-8, optimizer).backward();
      const at::Tensor grad = (*mixed.master_params(optimizer).begin()).grad();
      EXPECT_NEAR(grad.item<float>(), pass * 1e-8, pass * 1e-10);
    }
  });
}

// Its gradients would be added up without the first loss's scale.
TEST(MixedPrecision, ALossThroughModelsOfTwoObjectsCannotAccumulateInNoSync) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    struct Part {
      torch::nn::Linear net{2, 2};
      torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.1)};
      amp::MixedPrecision mixed = amp::initialize(
          net, optimizer, amp::Options("O1").dtype(torch::kHalf).loss_scale(64.0).verbosity(0));
    };
    Part encoder;
    Part decoder;
    DistributedDataParallel first(encoder.net, group);
    DistributedDataParallel second(decoder.net, group);
    const auto backward = [&] {
      const at::Tensor code = encoder.mixed.forward(first, torch::ones({1, 2}));
      const at::Tensor output = decoder.mixed.forward(second, code).to(torch::kFloat);
      encoder.mixed.scale_loss(output.sum(), encoder.optimizer).backward();
    };
    {
      const auto local = first.no_sync();
      const auto also_local = second.no_sync();
      expect_error(backward, {"[amp.mixed_precision.scale_loss]", "in one call of initialize",
                              "pass all models of the loss to initialize together"});
    }
    backward();
    expect_equal_on_all_ranks(group, gradients_of(decoder.net->parameters()));
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
          mixed
              .scale_loss(loss * (parallel ? 2 : 1), *optimizer,
                          amp::ScaleLossOptions().loss_id(last ? 1 : 0))
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

// Such a gradient has no mark of its own.
TEST(MixedPrecision, AGradientThatReplacesOneOfNoSyncIsReducedToo) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto level : {"O1", "O2"}) {
      for (const bool of_master : {false, true}) {
        SCOPED_TRACE(level);
        std::vector<std::vector<at::Tensor>> gradients;
        for (const bool parallel : {true, false}) {
          Net model = seeded<Net>(1);
          model->to(torch::kFloat);
          const auto optimizer = sgd(model, false);
          auto mixed = amp::initialize(
              model, *optimizer,
              amp::Options(level).dtype(torch::kHalf).loss_scale(64.0).verbosity(0));
          DistributedDataParallel ddp(model, parallel ? group : comm::Group());
          const auto pass = [&](int row) {
            const Batch batch = batch_of(1, 4).rows(row, row + 1);
            const auto loss = sum_of_squares(mixed.forward(ddp, batch.data.to(torch::kFloat)),
                                             batch.target.to(torch::kFloat));
            mixed.scale_loss(loss * (parallel ? 2 : 1), *optimizer).backward();
          };
          for (int step = 0; step < 2; ++step) {  // two, for what is left of the first
            mixed.zero_grad(*optimizer);
            {
              const auto local = ddp.no_sync();
              for (const int row : {0, 2})
                if (!parallel || row / 2 == rank.number()) pass(row);
            }
            const auto masters = mixed.master_params(*optimizer);
            for (const at::Tensor& parameter : of_master ? masters : model->parameters())
              parameter.mutable_grad() = parameter.grad() / 2;
            for (const int row : {1, 3})
              if (!parallel || row / 2 == rank.number()) pass(row);
          }
          std::vector<at::Tensor> result;
          for (const at::Tensor& master : mixed.master_params(*optimizer))
            result.push_back(master.grad());
          if (parallel) expect_equal_on_all_ranks(group, result);
          gradients.push_back(copies(result));
        }
        expect_near(gradients[0], gradients[1], 8 * dtype_limits(torch::kHalf).epsilon);
      }
    }
  });
}

// A loss that the program drops returns the gradients as they were, with their mark.
TEST(MixedPrecision, ADroppedLossLeavesGradientsOfNoSyncToTheNextPass) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool views : {false, true}) {
      SCOPED_TRACE(views);
      Net model = seeded<Net>(1);
      model->to(torch::kFloat);
      const auto optimizer = sgd(model, false);
      auto mixed = amp::initialize(
          model, *optimizer, amp::Options("O1").dtype(torch::kHalf).loss_scale(64.0).verbosity(0));
      DistributedDataParallel ddp(model, group,
                                  DistributedDataParallelOptions().gradient_as_bucket_view(views));
      const auto loss = [&](int row) {
        const Batch batch = batch_of(1, 4).rows(row, row + 1);
        return sum_of_squares(mixed.forward(ddp, batch.data.to(torch::kFloat)),
                              batch.target.to(torch::kFloat));
      };
      const auto backward = [&](int row) { mixed.scale_loss(loss(row), *optimizer).backward(); };
      const auto gradients = [&](bool drops, bool replaces) {
        optimizer->zero_grad(/*set_to_none=*/false);
        {
          const auto local = ddp.no_sync();
          backward(rank.number());
        }
        if (drops) {
          auto dropped = mixed.scale_loss(loss(3), *optimizer);
          dropped.value();
        }
        if (replaces) {
          for (const at::Tensor& parameter : model->parameters())
            parameter.mutable_grad() = parameter.grad() * 1;
        }
        backward(2 + rank.number());
        return copies(gradients_of(model->parameters()));
      };
      backward(0);  // the gradients are in buckets
      const auto want = gradients(false, false);
      for (const bool replaces : {false, true}) {
        const auto got = gradients(true, replaces);
        expect_equal_on_all_ranks(group, got);
        expect_near(got, want, 0);
      }
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

}  // namespace
}  // namespace semitone::parallel::ddp_mixed_precision_test
