#include "semitone/parallel/sampler.h"

#include "tests/support/errors.h"

#include <torch/data.h>
#include <torch/serialize/archive.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
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

torch::serialize::InputArchive written(torch::serialize::OutputArchive& out) {
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  return in;
}

torch::serialize::InputArchive state_of(const torch::data::samplers::Sampler<>& sampler) {
  torch::serialize::OutputArchive out;
  sampler.save(out);
  return written(out);
}

void copy_state(const torch::data::samplers::Sampler<>& from,
                torch::data::samplers::Sampler<>& to) {
  torch::serialize::InputArchive state = state_of(from);
  to.load(state);
}

// Of the samplers of all ranks.
template <typename Sampler>
std::vector<torch::serialize::InputArchive> states_of(const std::vector<Sampler>& samplers) {
  std::vector<torch::serialize::InputArchive> states;
  states.reserve(samplers.size());
  for (const Sampler& sampler : samplers) states.push_back(state_of(sampler));
  return states;
}

template <typename Sampler, typename... Options>
std::vector<Sampler> samplers_of(std::size_t size, int replicas, const Options&... options) {
  std::vector<Sampler> samplers;
  for (int rank = 0; rank < replicas; ++rank)
    samplers.emplace_back(size, replicas, rank, options...);
  return samplers;
}

// What all ranks return, in the order of the data set: rank by rank, one index each.
template <typename Sampler>
Indices together(std::vector<Sampler>& samplers, std::size_t of_each = SIZE_MAX) {
  Indices all;
  for (std::size_t i = 0; i < of_each; ++i) {
    const std::size_t before = all.size();
    for (Sampler& sampler : samplers) {
      if (const auto next = sampler.next(1)) all.push_back(next->front());
    }
    if (all.size() == before) break;
  }
  return all;
}

// A pass of which each number of ranks returns some, before another goes on.
template <typename Sampler, typename... Options>
Indices resharded_pass(std::size_t size, const std::vector<int>& replicas, std::size_t of_each,
                       const Options&... options) {
  auto samplers = samplers_of<Sampler>(size, replicas.front(), options...);
  Indices all = together(samplers, of_each);
  for (std::size_t i = 1; i < replicas.size(); ++i) {
    auto states = states_of(samplers);
    samplers = samplers_of<Sampler>(size, replicas[i], options...);
    for (Sampler& sampler : samplers) sampler.load_resharded(states);
    const Indices more = together(samplers, i + 1 == replicas.size() ? SIZE_MAX : of_each);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
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

// What a sampler of 11 samples and 2 ranks returns in an epoch, on rank 0.
Indices share_in(std::size_t epoch) {
  DistributedSampler sampler(11, 2, 0);
  sampler.set_epoch(epoch);
  sampler.reset();
  return rest_of(sampler);
}

DistributedSampler advancing() {
  return {11, 2, 0, DistributedSamplerOptions().advance_epoch(true)};
}

TEST(DistributedSampler, AdvancesTheEpochOfADataLoader) {
  for (const std::size_t workers : {0U, 2U}) {
    for (const bool drop_last : {false, true}) {
      const DistributedSampler sampler = advancing();
      const auto loader = torch::data::make_data_loader(Numbers(11), sampler,
                                                        torch::data::DataLoaderOptions()
                                                            .batch_size(4)
                                                            .workers(workers)
                                                            .drop_last(drop_last)
                                                            .enforce_ordering(true));
      for (std::size_t epoch = 0; epoch < 4; ++epoch) {
        EXPECT_EQ(sampler.epoch(), epoch);
        Indices want = share_in(epoch);
        if (drop_last) want.resize(4);
        EXPECT_EQ(pass_of(*loader), want);
      }
    }
  }
}

// A pass that ends early does not count: only some ranks may have begun it.
TEST(DistributedSampler, RepeatsTheOrderOfAPassThatEndsEarly) {
  DistributedSampler sampler = advancing();
  for (const std::size_t taken : {1U, 2U, 5U}) {
    sampler.reset();
    EXPECT_EQ(sampler.next(taken)->front(), share_in(0).front());
    EXPECT_EQ(sampler.epoch(), 0U);
  }
  sampler.reset();
  EXPECT_EQ(sampler.epoch(), 0U);
  EXPECT_EQ(rest_of(sampler), share_in(0));
  EXPECT_EQ(sampler.epoch(), 1U);
  // set_epoch takes effect, and the epoch advances from there.
  sampler.set_epoch(7);
  for (const std::size_t epoch : {7U, 8U}) {
    sampler.reset();
    EXPECT_EQ(rest_of(sampler), share_in(epoch));
  }
}

TEST(DistributedSampler, AdvancesTheEpochOnceWithTheLastIndex) {
  for (const std::size_t batch_size : {1U, 4U, 6U, 100U}) {
    DistributedSampler sampler = advancing();
    for (std::size_t epoch = 0; epoch < 3; ++epoch) {
      sampler.reset();
      while (sampler.index() < sampler.num_samples()) {
        EXPECT_EQ(sampler.epoch(), epoch);
        ASSERT_NE(sampler.next(batch_size), std::nullopt);
      }
      EXPECT_EQ(sampler.epoch(), epoch + 1);
      EXPECT_EQ(sampler.next(batch_size), std::nullopt);
      EXPECT_EQ(sampler.epoch(), epoch + 1);
    }
  }
}

TEST(DistributedSampler, KeepsRanksInOneEpochThoughOneOfThemLooksAtABatch) {
  const auto samplers =
      samplers_of<DistributedSampler>(12, 2, DistributedSamplerOptions().advance_epoch(true));
  auto loader0 = make_loader(12, samplers[0]);
  auto loader1 = make_loader(12, samplers[1]);
  std::vector<Indices> epochs;
  for (std::size_t epoch = 0; epoch < 4; ++epoch) {
    EXPECT_EQ(loader0->begin()->size(), 3U);
    for (const DistributedSampler& sampler : samplers) EXPECT_EQ(sampler.epoch(), epoch);
    Indices all = pass_of(*loader0);
    const Indices other = pass_of(*loader1);
    all.insert(all.end(), other.begin(), other.end());
    epochs.push_back(all);
    EXPECT_EQ(sorted(all), first(12));
  }
  for (std::size_t epoch = 1; epoch < epochs.size(); ++epoch)
    EXPECT_NE(epochs[epoch - 1], epochs[epoch]);
}

// A thread that reads a loader ends passes while the training asks for the epoch and saves it.
TEST(DistributedSampler, SharesTheEpochBetweenThreads) {
  constexpr std::size_t kPasses = 200;
  DistributedSampler sampler = advancing();
  std::thread reader([copy = sampler]() mutable {
    for (std::size_t pass = 0; pass < kPasses; ++pass) {
      copy.reset();
      rest_of(copy);
    }
  });
  DistributedSampler loaded = advancing();
  std::size_t last = 0;
  for (std::size_t i = 0; i < kPasses; ++i) {
    const std::size_t epoch = sampler.epoch();
    copy_state(sampler, loaded);
    EXPECT_GE(epoch, last);
    EXPECT_GE(loaded.epoch(), epoch);
    last = epoch;
  }
  reader.join();
  EXPECT_EQ(sampler.epoch(), kPasses);
  sampler.reset();
  EXPECT_EQ(rest_of(sampler), share_in(kPasses));
}

TEST(DistributedSampler, ContinuesToAdvanceTheEpochWhereItWasSaved) {
  // A loader's sampler, between two passes.
  DistributedSampler sampler = advancing();
  auto loader = make_loader(11, sampler);
  for (int pass = 0; pass < 3; ++pass) pass_of(*loader);
  auto state = state_of(sampler);
  DistributedSampler loaded = advancing();
  loaded.load(state);
  auto loader_of_loaded = make_loader(11, loaded);
  for (const std::size_t epoch : {3U, 4U}) EXPECT_EQ(pass_of(*loader_of_loaded), share_in(epoch));

  // Back to it, after a pass and from within one.
  EXPECT_EQ(pass_of(*loader), share_in(3));
  sampler.load(state);
  auto batch = loader->begin();
  EXPECT_EQ(batch->front(), share_in(3).front());
  sampler.load(state);
  while (batch != loader->end()) ++batch;  // completes a pass that began before the load
  EXPECT_EQ(pass_of(*loader), share_in(3));

  // Within a pass, and at its end.
  for (const std::size_t taken : {2U, 6U}) {
    DistributedSampler in_pass = advancing();
    in_pass.set_epoch(5);
    in_pass.reset();
    in_pass.next(taken);
    copy_state(in_pass, loaded);
    Indices want = share_in(5);
    want.erase(want.begin(), want.begin() + static_cast<std::ptrdiff_t>(taken));
    EXPECT_EQ(loaded.epoch(), want.empty() ? 6U : 5U);
    EXPECT_EQ(rest_of(loaded), want);
    EXPECT_EQ(loaded.epoch(), 6U);
    // Saved again at the end of the pass, and loaded into the same sampler.
    copy_state(loaded, loaded);
    EXPECT_EQ(rest_of(loaded), Indices{});
    EXPECT_EQ(loaded.epoch(), 6U);
    loaded.reset();
    EXPECT_EQ(rest_of(loaded), share_in(6));
  }
}

TEST(DistributedSampler, ResetDiscardsALoadedPositionAndKeepsTheEpoch) {
  auto saved =
      samplers_of<DistributedSampler>(11, 2, DistributedSamplerOptions().advance_epoch(true));
  for (DistributedSampler& sampler : saved) {
    sampler.set_epoch(5);
    sampler.reset();
    sampler.next(2);
  }
  DistributedSampler loaded = advancing();
  copy_state(saved[0], loaded);
  DistributedSampler resharded = advancing();
  auto states = states_of(saved);
  resharded.load_resharded(states);
  for (DistributedSampler* sampler : {&loaded, &resharded}) {
    sampler->reset();
    EXPECT_EQ(sampler->epoch(), 5U);
    EXPECT_EQ(rest_of(*sampler), share_in(5));
    EXPECT_EQ(sampler->epoch(), 6U);
  }
}

TEST(DistributedSampler, AdvancesTheEpochAfterTheRestOfAPassOfOthers) {
  const auto options = DistributedSamplerOptions().advance_epoch(true);
  auto saved = samplers_of<DistributedSampler>(12, 2, options);
  Indices all = together(saved, 2);
  auto states = states_of(saved);
  auto samplers = samplers_of<DistributedSampler>(12, 4, options);
  for (DistributedSampler& sampler : samplers) {
    sampler.load_resharded(states);
    EXPECT_EQ(sampler.epoch(), 0U);
  }
  // Saved again before it goes on.
  states = states_of(samplers);
  for (DistributedSampler& sampler : samplers) sampler.load_resharded(states);
  const Indices rest = together(samplers);
  all.insert(all.end(), rest.begin(), rest.end());
  EXPECT_EQ(sorted(all), first(12));
  for (DistributedSampler& sampler : samplers) {
    EXPECT_EQ(sampler.epoch(), 1U);
    sampler.reset();
  }
  auto alone = samplers_of<DistributedSampler>(12, 4);
  for (DistributedSampler& sampler : alone) {
    sampler.set_epoch(1);
    sampler.reset();
  }
  EXPECT_EQ(together(samplers), together(alone));
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
  DistributedSampler loaded(101, 3, 2, DistributedSamplerOptions().seed(7));
  copy_state(sampler, loaded);
  EXPECT_EQ(loaded.epoch(), 4U);
  EXPECT_EQ(loaded.index(), 13U);
  EXPECT_EQ(rest_of(loaded), rest_of(sampler));
}

TEST(DistributedSampler, RefusesAStateThatDoesNotFitAndKeepsItsOwn) {
  DistributedSampler sampler(99, 2, 0);
  sampler.next(50);
  DistributedSampler half(100, 2, 0, DistributedSamplerOptions().drop_last(true));
  half.next(7);
  test::expect_error([&] { copy_state(sampler, half); },
                     {"[parallel.distributed_sampler]", "49 samples", "50"});
  EXPECT_EQ(half.index(), 7U);
  EXPECT_EQ(half.num_samples(), 50U);
}

TEST(DistributedSampler, GoesOnWithAnotherNumberOfRanks) {
  const auto options = DistributedSamplerOptions().seed(3);
  auto alone = samplers_of<DistributedSampler>(96, 1, options);
  const Indices whole = together(alone);
  for (const auto& replicas : std::vector<std::vector<int>>{{2, 1}, {1, 5}, {4, 3}, {3, 2, 4, 1}})
    EXPECT_EQ(resharded_pass<DistributedSampler>(96, replicas, 6, options), whole);
}

TEST(DistributedSampler, PadsOrDropsInTheRestOfAReshardedPass) {
  const auto in_order = DistributedSamplerOptions().shuffle(false);
  // 10 samples, of which 2 ranks return 6. The rest on 3 ranks: 6 7 8, 9 and two that repeat.
  EXPECT_EQ(resharded_pass<DistributedSampler>(10, {2, 3}, 3, in_order),
            (Indices{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1}));
  EXPECT_EQ(resharded_pass<DistributedSampler>(
                10, {2, 3}, 3, DistributedSamplerOptions().shuffle(false).drop_last(true)),
            (Indices{0, 1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST(DistributedSampler, HasNothingLeftAfterAPassOfAnotherNumberOfRanks) {
  for (const bool drop_last : {false, true}) {
    const auto options = DistributedSamplerOptions().drop_last(drop_last);
    auto saved = samplers_of<DistributedSampler>(11, 4, options);
    together(saved);
    auto states = states_of(saved);
    auto samplers = samplers_of<DistributedSampler>(11, 2, options);
    for (DistributedSampler& sampler : samplers) sampler.load_resharded(states);
    EXPECT_EQ(together(samplers), Indices{});
    for (DistributedSampler& sampler : samplers) {
      sampler.set_epoch(1);
      sampler.reset();
    }
    EXPECT_EQ(together(samplers).size(), drop_last ? 10U : 12U);
  }
}

// What is left is whole, whatever the first ranks were ahead.
TEST(DistributedSampler, LosesNothingWithDropLastWhereRanksWereOneAhead) {
  const auto options = DistributedSamplerOptions().shuffle(false).drop_last(true);
  for (const std::size_t size : {9U, 10U}) {
    auto saved = samplers_of<DistributedSampler>(size, 3, options);
    Indices all = together(saved, 2);
    for (const std::size_t ahead : {0U, 1U}) all.push_back(saved[ahead].next(1)->front());
    auto states = states_of(saved);
    DistributedSampler alone(size, 1, 0, options);
    alone.load_resharded(states);
    for (const std::size_t index : rest_of(alone)) all.push_back(index);
    EXPECT_EQ(sorted(all), first(size));
  }
}

TEST(DistributedSampler, SavesTheRestOfAReshardedPass) {
  auto saved = samplers_of<DistributedSampler>(100, 3);
  for (DistributedSampler& sampler : saved) sampler.set_epoch(5);
  for (DistributedSampler& sampler : saved) sampler.reset();
  together(saved, 7);
  auto states = states_of(saved);
  DistributedSampler resharded(100, 2, 1);
  resharded.load_resharded(states);
  EXPECT_EQ(resharded.epoch(), 5U);
  resharded.next(9);
  DistributedSampler loaded(100, 2, 1);
  copy_state(resharded, loaded);
  EXPECT_EQ(loaded.index(), 9U);
  const Indices rest = rest_of(loaded);
  EXPECT_EQ(rest.size(), 31U);  // of 79 on two ranks: 40, of which 9 are returned
  EXPECT_EQ(rest, rest_of(resharded));
}

TEST(DistributedSampler, RefusesStatesThatAreNotOfOneMoment) {
  auto saved = samplers_of<DistributedSampler>(20, 2);
  saved[0].next(4);
  saved[1].next(2);
  DistributedSampler alone(20, 1, 0);
  alone.next(3);
  const auto load = [&] {
    auto states = states_of(saved);
    alone.load_resharded(states);
  };
  test::expect_error(load, {"[parallel.distributed_sampler]", "equally many", "got 4, 2"});
  saved[1].next(2);
  saved[1].set_epoch(2);
  test::expect_error(load, {"the same pass", "epoch 2, 0 of 20 on rank 1"});
  saved.pop_back();
  test::expect_error(load, {"the states of all 2 ranks", "got 1"});
  test::expect_error([&] { copy_state(saved[0], alone); }, {"one of 2", "load_resharded"});
  EXPECT_EQ(alone.index(), 3U);
}

TEST(DistributedSampler, RefusesNumbersThatNoSamplerHas) {
  DistributedSampler sampler(20, 2, 1);
  sampler.next(3);
  const auto state_with = [&](const std::string& key, std::int64_t value) {
    torch::serialize::OutputArchive out;
    for (const auto& [name, number] : std::map<std::string, std::int64_t>{
             {"epoch", 0}, {"size", 20}, {"consumed", 0}, {"index", 3}, {"num_replicas", 2}})
      out.write(name, torch::tensor(name == key ? value : number, torch::kLong), true);
    return written(out);
  };
  const auto expect_refused = [&](const std::string& key, std::int64_t value) {
    SCOPED_TRACE(key);
    std::vector<torch::serialize::InputArchive> two;
    two.push_back(state_with(key, value));
    two.push_back(state_with(key, value));
    EXPECT_THROW(sampler.load(two[0]), Error);
    EXPECT_THROW(sampler.load_resharded(two), Error);
    EXPECT_EQ(sampler.index(), 3U);
    EXPECT_EQ(sampler.num_samples(), 10U);
  };
  expect_refused("size", -1);
  expect_refused("consumed", 21);
  expect_refused("consumed", -1);
  expect_refused("index", 500);
  expect_refused("index", -1);
  expect_refused("num_replicas", 3);
  expect_refused("num_replicas", 0);
  // Any number is an epoch: a hash, perhaps.
  sampler.set_epoch(SIZE_MAX);
  DistributedSampler loaded(20, 2, 1);
  copy_state(sampler, loaded);
  EXPECT_EQ(loaded.epoch(), SIZE_MAX);
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

// The data set has grown, or shrunk, between two runs.
TEST(Samplers, FinishASavedPassAndThenTakeTheirOwnSize) {
  const auto check = [](auto saved, auto larger, auto smaller) {
    saved.next(4);
    copy_state(saved, larger);
    EXPECT_EQ(rest_of(larger), (Indices{4, 5}));
    larger.reset();
    EXPECT_EQ(rest_of(larger), first(9));
    test::expect_error([&] { copy_state(saved, smaller); },
                       {"a position in at most 5 samples", "got one in 6"});
    EXPECT_EQ(rest_of(smaller), first(5));
    std::vector<decltype(saved)> one{saved};
    auto states = states_of(one);
    test::expect_error([&] { smaller.load_resharded(states); }, {"at most 5 samples"});
    larger.reset(7);
    larger.load_resharded(states);
    EXPECT_EQ(rest_of(larger), (Indices{4, 5}));
    larger.reset();
    EXPECT_EQ(rest_of(larger), first(7));
  };
  const auto in_order = [](std::size_t size) {
    return DistributedSampler(size, 1, 0, DistributedSamplerOptions().shuffle(false));
  };
  check(in_order(6), in_order(9), in_order(5));
  check(EvaluationSampler(6, 1, 0), EvaluationSampler(9, 1, 0), EvaluationSampler(5, 1, 0));
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
  EvaluationSampler loaded(100, 3, 1);
  copy_state(sampler, loaded);
  EXPECT_EQ(rest_of(loaded), rest_of(sampler));
  EvaluationSampler small(100, 10, 1);
  EvaluationSampler far(100, 3, 1);
  far.next(20);
  test::expect_error([&] { copy_state(far, small); },
                     {"[parallel.evaluation_sampler]", "of 10 ranks", "3"});
  EXPECT_EQ(small.index(), 0U);
}

TEST(EvaluationSampler, GoesOnWithAnotherNumberOfRanks) {
  for (const std::size_t size : {0U, 5U, 60U, 61U}) {
    for (const std::size_t of_each : {0U, 2U, 19U, 40U}) {
      for (const auto& replicas : std::vector<std::vector<int>>{{2, 1}, {1, 4}, {4, 3}, {3, 2, 7}})
        EXPECT_EQ(resharded_pass<EvaluationSampler>(size, replicas, of_each), first(size));
    }
  }
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
