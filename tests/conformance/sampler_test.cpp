#include "semitone/parallel/sampler.h"

#include "tests/support/conformance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace semitone::parallel {
namespace {

using nlohmann::json;
using Indices = std::vector<std::size_t>;

DistributedSampler make_sampler(const json& record, int rank) {
  DistributedSampler sampler(record.at("size"), record.at("replicas"), rank,
                             DistributedSamplerOptions()
                                 .shuffle(record.at("shuffle"))
                                 .seed(record.at("seed"))
                                 .drop_last(record.at("drop_last")));
  sampler.set_epoch(record.at("epoch"));
  sampler.reset();
  return sampler;
}

// In batches of odd sizes, whose borders must not matter.
Indices all_of(DistributedSampler& sampler) {
  Indices all;
  for (std::size_t batch_size = 1; const auto batch = sampler.next(batch_size); batch_size += 2)
    all.insert(all.end(), batch->begin(), batch->end());
  return all;
}

std::string name_of(const json& record, int rank) {
  json name = record;
  for (const char* key : {"indices", "head", "tail", "weighted_sum"}) name.erase(key);
  return name.dump() + " rank " + std::to_string(rank);
}

TEST(SamplerConformance, EveryRankGetsTheIndicesOfThePeer) {
  const json data = test::conformance("sampler.json");
  for (const json& record : data.at("cases")) {
    for (int rank = 0; rank < record.at("replicas").get<int>(); ++rank) {
      SCOPED_TRACE(name_of(record, rank));
      DistributedSampler sampler = make_sampler(record, rank);
      EXPECT_EQ(sampler.num_samples(), record.at("num_samples").get<std::size_t>());
      EXPECT_EQ(all_of(sampler),
                record.at("indices").at(static_cast<std::size_t>(rank)).get<Indices>());
    }
  }
}

TEST(SamplerConformance, LargeDataSetsHaveTheIndicesOfThePeer) {
  const json data = test::conformance("sampler.json");
  for (const json& record : data.at("large")) {
    for (int rank = 0; rank < record.at("replicas").get<int>(); ++rank) {
      SCOPED_TRACE(name_of(record, rank));
      const json& want = record.at("ranks").at(static_cast<std::size_t>(rank));
      DistributedSampler sampler = make_sampler(record, rank);
      const Indices indices = all_of(sampler);
      ASSERT_EQ(indices.size(), record.at("num_samples").get<std::size_t>());
      const auto head = want.at("head").get<Indices>();
      const auto tail = want.at("tail").get<Indices>();
      ASSERT_LE(std::max(head.size(), tail.size()), indices.size());
      EXPECT_TRUE(std::equal(head.begin(), head.end(), indices.begin()));
      EXPECT_TRUE(std::equal(tail.rbegin(), tail.rend(), indices.rbegin()));
      std::uint64_t weighted_sum = 0;
      for (std::size_t i = 0; i < indices.size(); ++i) weighted_sum += (i + 1) * indices[i];
      EXPECT_EQ(weighted_sum, want.at("weighted_sum").get<std::uint64_t>());
    }
  }
}

}  // namespace
}  // namespace semitone::parallel
