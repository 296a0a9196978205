// amp::DivergenceGuard on several ranks.

#include "semitone/amp/divergence_guard.h"

#include "semitone/amp/initialize.h"
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace semitone::parallel::divergence_guard_test {
namespace {

using test::Rank;
using test::run_ranks;

// What one rank sees ends the training on all, with one message.
TEST(DivergenceGuardOnRanks, AllRanksComeToTheSameResult) {
  const auto results = run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto agree = [&](at::Tensor& loss) { group.all_reduce(loss, comm::ReduceOp::mean); };
    amp::DivergenceGuard guard(amp::DivergenceGuardOptions()
                                   .max_loss_ratio(2)
                                   .max_consecutive_spikes(2)
                                   .warmup_steps(2)
                                   .agree(agree));
    const auto observe = [&](double loss) {
      return guard.observe(torch::full({}, loss), amp::Step::stepped);
    };
    observe(1 + rank.number());
    observe(2 - rank.number());
    EXPECT_EQ(guard.mean_loss(), 1.5);
    EXPECT_EQ(observe(rank.number() == 1 ? 9 : 1), amp::DivergenceGuard::Observed::spike);
    rank.report(test::message_of<DivergedError>([&] { observe(rank.number() == 1 ? 9 : 1); }));
    rank.report(
        test::message_of<DivergedError>([&] { observe(rank.number() == 1 ? std::nan("") : 1); }));
  });
  ASSERT_EQ(results.size(), 2U);
  EXPECT_EQ(results[0].reports, results[1].reports);
  ASSERT_EQ(results[0].reports.size(), 2U);
  EXPECT_NE(results[0].reports[0].find("the last 5 in step 4"), std::string::npos)
      << results[0].reports[0];
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors)
    copies.push_back(tensor.detach().to(torch::kFloat, /*non_blocking=*/false, /*copy=*/true));
  return copies;
}

bool are_equal(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  for (std::size_t i = 0; i < some.size(); ++i) {
    if (!torch::equal(some[i], others[i])) return false;
  }
  return true;
}

// A training in which only rank 1 has bad batches.
void leave_out_batches(const amp::Options& options, const comm::Group& group,
                       bool before_backward) {
  using Observed = amp::DivergenceGuard::Observed;
  torch::manual_seed(1);
  test::ToyNet net;
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  auto mixed = amp::initialize(net, optimizer, amp::Options(options).verbosity(0));
  DistributedDataParallel ddp(net, group);
  const auto agree = [&](at::Tensor& loss) { group.all_reduce(loss, comm::ReduceOp::mean); };
  amp::DivergenceGuard guard(
      amp::DivergenceGuardOptions().max_loss_ratio(10).warmup_steps(2).agree(agree));
  for (int step = 0; step < 10; ++step) {
    const bool is_bad = step == 4 || step == 5 || step == 8;
    const double bad_factor = step == 5 ? std::nan("") : 1e4;
    const auto before = copies_of(net->parameters());
    torch::manual_seed(static_cast<std::uint64_t>(100 * std::int64_t{step} + group.rank()));
    optimizer.zero_grad();
    const at::Tensor loss = mixed.forward(ddp, torch::randn({8, 6})).pow(2).mean() *
                            (is_bad && group.rank() == 1 ? bad_factor : 1.0);
    if (!before_backward) mixed.scale_loss(loss, optimizer).backward();
    const bool is_left_out = guard.inspect(loss) == Observed::spike;
    EXPECT_EQ(is_left_out, is_bad) << step;
    if (is_left_out) {
      if (!before_backward) mixed.zero_grad(optimizer);
    } else {
      if (before_backward) mixed.scale_loss(loss, optimizer).backward();
      guard.observe(mixed.step(optimizer));
    }
    EXPECT_EQ(are_equal(copies_of(net->parameters()), before), is_bad) << step;
  }
  const auto mine = copies_of(net->parameters());
  const auto of_rank_0 = copies_of(mine);
  group.broadcast(of_rank_0);
  EXPECT_TRUE(are_equal(mine, of_rank_0));
}

TEST(DivergenceGuardOnRanks, AllRanksLeaveOutTheSameBatches) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    for (const char* const level : {"O0", "O1", "O2"}) {
      for (const bool before_backward : {true, false}) {
        SCOPED_TRACE(std::string(level) + (before_backward ? ", before" : ", after"));
        leave_out_batches(amp::Options(level).dtype(torch::kBFloat16).loss_scale("dynamic"), group,
                          before_backward);
      }
    }
  });
}

}  // namespace
}  // namespace semitone::parallel::divergence_guard_test
