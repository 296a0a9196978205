// The launchers on this machine start this program several times, once per rank.
#include "semitone/comm/init.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "src/comm/rendezvous.h"
#include "tests/parallel/models.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace semitone {
namespace {

using test::Batch;
using test::batch_of;
using test::Net;
using test::seeded;
using test::sum_of_squares;

int ranks() {
  const char* const count = std::getenv("SEMITONE_TEST_RANKS");
  return count == nullptr ? 0 : std::stoi(count);
}

TEST(Launched, ProcessesMeetAndTrain) {
  ASSERT_GT(ranks(), 1) << "SEMITONE_TEST_RANKS says how many processes the launcher starts";
  const comm::Rendezvous place = comm::parse_rendezvous("env://");
  const comm::Group group = comm::init();
  ASSERT_EQ(group.size(), ranks());
  EXPECT_EQ(place.local_rank, group.rank());
  EXPECT_EQ(place.local_world_size, ranks());
  at::Tensor sum = torch::full({1}, group.rank());
  group.all_reduce(sum);
  EXPECT_EQ(sum.item<std::int64_t>(), ranks() * (ranks() - 1) / 2);

  // Each rank has two rows of a batch; one process alone has all.
  Net alone = seeded<Net>(1);
  Net model = seeded<Net>(1 + static_cast<std::uint64_t>(group.rank()));
  parallel::DistributedDataParallel ddp(model, group);
  const auto batch = [&](int step) { return batch_of(100 + step, 2 * ranks()); };
  test::train(*alone, 5, [&](int step) {
    sum_of_squares(alone->forward(batch(step).data), batch(step).target).backward();
  });
  test::train(*model, 5, [&](int step) {
    const Batch rows = batch(step).rows(2 * group.rank(), 2 * group.rank() + 2);
    (sum_of_squares(ddp.forward(rows.data), rows.target) * ranks()).backward();
  });
  for (std::size_t i = 0; i < model->parameters().size(); ++i)
    EXPECT_TRUE(test::near(model->parameters()[i], alone->parameters()[i], 1e-12)) << i;
}

}  // namespace
}  // namespace semitone
