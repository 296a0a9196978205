// amp::DivergenceGuard on several ranks.

#include "semitone/amp/divergence_guard.h"

#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <string>

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

}  // namespace
}  // namespace semitone::parallel::divergence_guard_test
