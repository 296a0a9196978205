// 20 steps of 2 and of 4 ranks against one process that has their whole batch, in fp64.
#include "semitone/comm/init.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/sync_batch_norm.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace semitone::parallel::large_batch_test {
namespace {

using test::Batch;
using test::batch_of;
using test::Net;
using test::Rank;
using test::run_ranks;
using test::seeded;
using test::sum_of_squares;
using Shares = std::vector<std::int64_t>;  // rows of each rank

constexpr int kSteps = 20;
constexpr std::int64_t kRows = 16;

// Even and uneven. Of two rows at least: torch::nn::BatchNorm1d refuses a single one.
std::vector<Shares> shares_of(int ranks) {
  if (ranks == 2) return {{8, 8}, {11, 5}};
  return {{4, 4, 4, 4}, {7, 2, 2, 5}};
}

std::vector<std::pair<std::string, DistributedDataParallelOptions>> ways() {
  return {{"default", DistributedDataParallelOptions()},
          {"static_graph", DistributedDataParallelOptions().static_graph(true)},
          {"static_graph, views",
           DistributedDataParallelOptions().static_graph(true).gradient_as_bucket_view(true)},
          {"small buckets",
           DistributedDataParallelOptions().bucket_cap_mb(0.0002).first_bucket_mb(0.0001)}};
}

Batch whole_batch(int step) {
  return batch_of(100 + step, kRows);
}

Net trained_alone(bool normalised) {
  Net model = seeded<Net>(1, normalised);
  test::train(*model, kSteps, [&](int step) {
    const Batch batch = whole_batch(step);
    (sum_of_squares(model->forward(batch.data), batch.target) / kRows).backward();
  });
  return model;
}

void expect_same(const torch::nn::Module& got, const torch::nn::Module& want) {
  const auto parameters = want.named_parameters();
  for (const auto& entry : got.named_parameters())
    EXPECT_TRUE(test::near(entry.value(), parameters[entry.key()], test::kSumTolerance))
        << entry.key();
  const auto buffers = want.named_buffers();
  for (const auto& entry : got.named_buffers())
    EXPECT_TRUE(test::near(entry.value(), buffers[entry.key()], test::kSumTolerance))
        << entry.key();
}

// Trains with each share and method. `pass` computes the gradients of rows [begin, end) of a batch.
void train_together(Rank& rank, bool normalised,
                    const std::function<void(DistributedDataParallel<Net>&, const Batch&,
                                             std::int64_t begin, std::int64_t end)>& pass) {
  const auto group = comm::init();
  const Net alone = trained_alone(normalised);
  for (const auto& [name, options] : ways()) {
    for (const Shares& shares : shares_of(rank.count())) {
      SCOPED_TRACE(name);
      Net model = seeded<Net>(1 + static_cast<std::uint64_t>(rank.number()), normalised);
      EXPECT_EQ(convert_sync_batchnorm(*model, group), normalised ? 1u : 0u);
      DistributedDataParallel ddp(model, group, options);
      const auto first = shares.begin() + rank.number();
      const auto begin = std::accumulate(shares.begin(), first, std::int64_t{0});
      test::train(*model, kSteps,
                  [&](int step) { pass(ddp, whole_batch(step), begin, begin + *first); });
      expect_same(*model, *alone);
    }
  }
}

// The mean over the whole batch is what the mean over the ranks of these is.
at::Tensor loss_of(DistributedDataParallel<Net>& ddp, const Batch& rows, int ranks) {
  return sum_of_squares(ddp.forward(rows.data), rows.target) * ranks / kRows;
}

class LargeBatch : public ::testing::TestWithParam<int> {};

TEST_P(LargeBatch, IsTrainedOnTogether) {
  run_ranks(GetParam(), [](Rank& rank) {
    train_together(
        rank, false,
        [&](DistributedDataParallel<Net>& ddp, const Batch& batch, std::int64_t begin,
            std::int64_t end) { loss_of(ddp, batch.rows(begin, end), rank.count()).backward(); });
  });
}

TEST_P(LargeBatch, IsNormalisedTogether) {
  run_ranks(GetParam(), [](Rank& rank) {
    train_together(
        rank, true,
        [&](DistributedDataParallel<Net>& ddp, const Batch& batch, std::int64_t begin,
            std::int64_t end) { loss_of(ddp, batch.rows(begin, end), rank.count()).backward(); });
  });
}

TEST_P(LargeBatch, MayComeInParts) {
  run_ranks(GetParam(), [](Rank& rank) {
    train_together(rank, false,
                   [&](DistributedDataParallel<Net>& ddp, const Batch& batch, std::int64_t begin,
                       std::int64_t end) {
                     // Row by row, but for the last two.
                     {
                       const auto local = ddp.no_sync();
                       for (; begin + 2 < end; ++begin)
                         loss_of(ddp, batch.rows(begin, begin + 1), rank.count()).backward();
                     }
                     loss_of(ddp, batch.rows(begin, end), rank.count()).backward();
                   });
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LargeBatch, ::testing::Values(2, 4));

}  // namespace
}  // namespace semitone::parallel::large_batch_test
