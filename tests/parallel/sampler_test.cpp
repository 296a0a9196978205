#include "semitone/parallel/sampler.h"

#include "tests/support/errors.h"

#include <torch/data.h>
#include <torch/serialize/archive.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <sstream>
#include <vector>

namespace semitone::parallel {
namespace {

using Indices = std::vector<std::size_t>;

Indices first(std::size_t count) {
  Indices numbers(count);
  std::iota(numbers.begin(), numbers.end(), std::size_t{0});
  return numbers;
}

Indices sorted(Indices indices) {
  std::sort(indices.begin(), indices.end());
  return indices;
}

Indices rest_of(torch::data::samplers::Sampler<>& sampler, std::size_t batch_size = 4) {
  Indices all;
  while (const auto batch = sampler.next(batch_size))
    all.insert(all.end(), batch->begin(), batch->end());
  return all;
}

// Returns its argument.
class Numbers : public torch::data::datasets::Dataset<Numbers, std::size_t> {
 public:
  explicit Numbers(std::size_t size) : size_(size) {}
  std::size_t get(std::size_t index) override { return index; }
  std::optional<std::size_t> size() const override { return size_; }

 private:
  std::size_t size_;
};

template <typename Loader>
Indices pass_of(Loader& loader) {
  Indices all;
  for (const auto& batch : loader) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

template <typename Sampler>
auto make_loader(std::size_t size, const Sampler& sampler, std::size_t workers = 0) {
  return torch::data::make_data_loader(
      Numbers(size), sampler,
      torch::data::DataLoaderOptions().batch_size(3).workers(workers).enforce_ordering(true));
}

void copy_state(const torch::data::samplers::Sampler<>& from,
                torch::data::samplers::Sampler<>& to) {
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  from.save(out);
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  to.load(in);
}

TEST(DistributedSampler, RanksShareTheDataSetOnce) {
  Indices all;
  for (int rank = 0; rank < 4; ++rank) {
    DistributedSampler sampler(20, 4, rank);
    const Indices share = rest_of(sampler);
    EXPECT_EQ(share.size(), 5U);
    all.insert(all.end(), share.begin(), share.end());
  }
  EXPECT_NE(all, first(20));
  EXPECT_EQ(sorted(all), first(20));
}

TEST(DistributedSampler, PadsWithItsStartOrDropsTheTail) {
  const auto share = [](int rank, bool drop_last) {
    DistributedSampler sampler(5, 3, rank,
                               DistributedSamplerOptions().shuffle(false).drop_last(drop_last));
    return rest_of(sampler);
  };
  EXPECT_EQ(share(0, false), (Indices{0, 3}));
  EXPECT_EQ(share(1, false), (Indices{1, 4}));
  EXPECT_EQ(share(2, false), (Indices{2, 0}));
  EXPECT_EQ(share(0, true), (Indices{0}));
  EXPECT_EQ(share(2, true), (Indices{2}));
}

TEST(DistributedSampler, SeedAndEpochAddUpToTheOrder) {
  const auto order = [](std::uint64_t seed, std::size_t epoch) {
    DistributedSampler sampler(100, 2, 1, DistributedSamplerOptions().seed(seed));
    sampler.set_epoch(epoch);
    sampler.reset();
    return rest_of(sampler);
  };
  EXPECT_EQ(order(0, 0), order(0, 0));
  EXPECT_NE(order(0, 0), order(0, 1));
  EXPECT_NE(order(0, 0), order(1, 0));
  EXPECT_EQ(order(3, 4), order(5, 2));
}

TEST(DistributedSampler, SetEpochCountsFromTheNextReset) {
  DistributedSampler sampler(50, 1, 0);
  const Indices epoch0 = rest_of(sampler);
  sampler.reset();
  EXPECT_EQ(rest_of(sampler), epoch0);
  sampler.reset();
  const Indices head = *sampler.next(10);
  sampler.set_epoch(1);
  Indices all = head;
  const Indices tail = rest_of(sampler);
  all.insert(all.end(), tail.begin(), tail.end());
  EXPECT_EQ(all, epoch0);
  sampler.reset();
  EXPECT_NE(rest_of(sampler), epoch0);
}

TEST(DistributedSampler, TakesANewSizeAtReset) {
  DistributedSampler sampler(10, 2, 1, DistributedSamplerOptions().shuffle(false));
  sampler.reset(5);
  EXPECT_EQ(sampler.num_samples(), 3U);
  EXPECT_EQ(rest_of(sampler), (Indices{1, 3, 0}));
  sampler.reset(0);
  EXPECT_EQ(sampler.next(4), std::nullopt);
}

TEST(DistributedSampler, FeedsADataLoaderThatHearsOfNewEpochs) {
  for (const std::size_t workers : {0U, 2U}) {
    std::vector<DistributedSampler> samplers{{11, 2, 0}, {11, 2, 1}};
    auto loader0 = make_loader(11, samplers[0], workers);
    auto loader1 = make_loader(11, samplers[1], workers);
    std::vector<Indices> epochs;
    for (std::size_t epoch = 0; epoch < 3; ++epoch) {
      for (DistributedSampler& sampler : samplers) sampler.set_epoch(epoch);
      Indices all = pass_of(*loader0);
      EXPECT_EQ(all.size(), 6U);
      DistributedSampler alone(11, 2, 0);
      alone.set_epoch(epoch);
      alone.reset();
      EXPECT_EQ(all, rest_of(alone));

      const Indices other = pass_of(*loader1);
      EXPECT_EQ(other.size(), 6U);
      all.insert(all.end(), other.begin(), other.end());
      epochs.push_back(all);
      Indices distinct = sorted(all);
      distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
      EXPECT_EQ(distinct, first(11));
    }
    EXPECT_NE(epochs[0], epochs[1]);
    EXPECT_NE(epochs[1], epochs[2]);
  }
}

TEST(DistributedSampler, CopiesHaveAPositionOfTheirOwn) {
  DistributedSampler sampler(8, 2, 0);
  DistributedSampler copy = sampler;
  EXPECT_EQ(copy.next(3)->size(), 3U);
  EXPECT_EQ(copy.index(), 3U);
  EXPECT_EQ(sampler.index(), 0U);
}

TEST(DistributedSampler, GoesOnWhereItWasSaved) {
  DistributedSampler sampler(101, 3, 2, DistributedSamplerOptions().seed(7));
  sampler.set_epoch(4);
  sampler.reset();
  sampler.next(13);
  DistributedSampler loaded(50, 3, 2, DistributedSamplerOptions().seed(7));
  copy_state(sampler, loaded);
  EXPECT_EQ(loaded.epoch(), 4U);
  EXPECT_EQ(loaded.index(), 13U);
  EXPECT_EQ(rest_of(loaded), rest_of(sampler));
}

TEST(DistributedSampler, RefusesAStateThatDoesNotFitAndKeepsItsOwn) {
  DistributedSampler sampler(100, 1, 0);
  sampler.next(60);
  DistributedSampler half(100, 2, 0);
  half.next(7);
  test::expect_error([&] { copy_state(sampler, half); },
                     {"[parallel.distributed_sampler]", "50 samples", "60"});
  EXPECT_EQ(half.index(), 7U);
  EXPECT_EQ(half.num_samples(), 50U);
}

TEST(DistributedSampler, RefusesRanksThatDoNotExist) {
  test::expect_error([] { DistributedSampler(10, 4, 4); },
                     {"[parallel.distributed_sampler]", "from 0 to 3", "rank 4 of 4"});
  test::expect_error([] { DistributedSampler(10, 4, -1); }, {"rank -1"});
  test::expect_error([] { DistributedSampler(10, 0, 0); }, {"at least 1", "num_replicas 0"});
  test::expect_error([] { DistributedSampler(10, -2, 0); }, {"num_replicas -2"});
  DistributedSampler sampler(10, 1, 0);
  test::expect_error([&] { sampler.next(0); }, {"batch size"});
}

TEST(EvaluationSampler, GivesEveryIndexToExactlyOneRank) {
  for (const std::size_t size : {0U, 1U, 5U, 12U, 13U}) {
    for (const int replicas : {1, 3, 7}) {
      Indices all;
      for (int rank = 0; rank < replicas; ++rank) {
        EvaluationSampler sampler(size, replicas, rank);
        const Indices share = rest_of(sampler);
        EXPECT_EQ(share.size(), sampler.num_samples());
        all.insert(all.end(), share.begin(), share.end());
      }
      EXPECT_EQ(sorted(all), first(size));
    }
  }
}

TEST(EvaluationSampler, StridesInOrder) {
  EvaluationSampler sampler(8, 3, 1);
  EXPECT_EQ(*sampler.next(2), (Indices{1, 4}));
  EXPECT_EQ(*sampler.next(2), (Indices{7}));
  EXPECT_EQ(sampler.next(2), std::nullopt);
  sampler.reset(4);
  EXPECT_EQ(rest_of(sampler), (Indices{1}));
}

TEST(EvaluationSampler, FeedsADataLoader) {
  const EvaluationSampler sampler(10, 3, 0);
  auto loader = make_loader(10, sampler);
  for (int pass = 0; pass < 2; ++pass) EXPECT_EQ(pass_of(*loader), (Indices{0, 3, 6, 9}));
  const EvaluationSampler none(2, 3, 2);
  EXPECT_EQ(pass_of(*make_loader(2, none)), Indices{});
}

TEST(EvaluationSampler, GoesOnWhereItWasSaved) {
  EvaluationSampler sampler(100, 3, 1);
  sampler.next(20);
  EvaluationSampler loaded(10, 3, 1);
  copy_state(sampler, loaded);
  EXPECT_EQ(rest_of(loaded), rest_of(sampler));
  EvaluationSampler small(100, 10, 1);
  EvaluationSampler far(100, 3, 1);
  far.next(20);
  test::expect_error([&] { copy_state(far, small); }, {"[parallel.evaluation_sampler]", "20"});
  EXPECT_EQ(small.index(), 0U);
}

TEST(EvaluationSampler, RefusesRanksThatDoNotExist) {
  test::expect_error([] { EvaluationSampler(10, 4, 4); },
                     {"[parallel.evaluation_sampler]", "rank 4 of 4"});
  test::expect_error([] { EvaluationSampler(10, 0, 0); }, {"num_replicas 0"});
  EvaluationSampler sampler(10, 1, 0);
  test::expect_error([&] { sampler.next(0); }, {"batch size"});
}

}  // namespace
}  // namespace semitone::parallel
