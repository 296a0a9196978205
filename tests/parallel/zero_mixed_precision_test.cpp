// ZeroRedundancyOptimizer with opt levels, master weights and a GradScaler.

#include "semitone/amp/initialize.h"
#include "semitone/comm/group.h"
#include "semitone/comm/init.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/zero_redundancy_optimizer.h"
#include "semitone/scaling/grad_scaler.h"
#include "semitone/scaling/master_weights.h"
#include "tests/parallel/models.h"
#include "tests/parallel/zero_fixture.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace semitone::parallel::zero_test {
namespace {

using test::Rank;
using test::run_ranks;

// Model and optimizer on rank 0's share of the data, and so on, at an opt level.
void train_at(amp::OptLevel level, Rank& rank, const comm::Group& group, Net& model,
              torch::optim::Optimizer& optimizer) {
  auto mixed = amp::initialize(
      model, optimizer, amp::Options(level).dtype(torch::kBFloat16).loss_scale(128.).verbosity(0));
  DistributedDataParallel ddp(model, group);
  for (int step = 0; step < 6; ++step) {
    const Batch batch = batch_of(100 + step, 8).rows(4 * rank.number(), 4 * rank.number() + 4);
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
        const Batch batch = batch_of(step, 8);
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
        const Batch batch = batch_of(step, 8);
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

}  // namespace
}  // namespace semitone::parallel::zero_test
