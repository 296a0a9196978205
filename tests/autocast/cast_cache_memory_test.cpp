// The weight-cast cache: which casts are kept, for how long, and in which threads.

#include "semitone/autocast/autocast.h"
#include "tests/autocast/cast_cache_fixture.h"
#include "tests/support/casts.h"

#include <ATen/ThreadLocalState.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace semitone::amp::cast_cache_test {
namespace {

using test::CastRecording;

TEST_F(CastCacheTest, FrozenWeightsAreCachedWhereThePolicyKnowsThem) {
  torch::nn::Linear linear(kIn, kOut);
  linear->weight.requires_grad_(false);
  for (const bool bound : {false, true}) {
    const CastRecording casts;
    const Autocast region(bound ? bf16.bind(linear) : bf16);
    (void)linear(x);
    (void)linear(x);
    EXPECT_EQ(casts->computed(kWeight), bound ? 1U : 2U);
    EXPECT_EQ(casts->cached(kWeight), bound ? 1U : 0U);
  }
}

// The memory of a tensor, observed from outside: whether anything still holds it.
c10::weak_intrusive_ptr<c10::StorageImpl> memory_of(const at::Tensor& tensor) {
  return tensor.storage().getWeakStorageImpl();
}

TEST_F(CastCacheTest, ActivationsAreNotRetained) {
  const torch::NoGradGuard no_grad;
  const Autocast region(bf16);
  auto hidden = at::relu(at::mm(x, weight).to(torch::kFloat));
  const auto memory = memory_of(hidden);
  (void)at::mm(hidden, weight.t());
  hidden.reset();
  EXPECT_TRUE(memory.expired());
}

TEST_F(CastCacheTest, CastsAreFreedWithTheRegionAlsoIfAStateOutlivesIt) {
  // An operator that returns its argument shows the cast that the cache holds.
  const auto policy = CastPolicy::semitone({torch::kCPU, kBf16}).lower("dropout");
  c10::weak_intrusive_ptr<c10::StorageImpl> memory = memory_of(x);
  std::optional<AutocastState> state;
  {
    const torch::NoGradGuard no_grad;
    const Autocast region(policy);
    memory = memory_of(at::dropout(weight, 0.5, /*train=*/false));
    EXPECT_FALSE(memory.expired()) << "cached";
    state = AutocastState::current();
  }
  EXPECT_TRUE(memory.expired());
}

TEST_F(CastCacheTest, FreedWeightsLeaveNothingBehindAtTheirAddress) {
  const torch::NoGradGuard no_grad;
  const Autocast region(bf16);
  for (int i = 0; i < 200; ++i) {
    weight = torch::full({kIn, kOut}, static_cast<float>(i % 7)).requires_grad_();
    expect_current(at::mm(x, weight));
  }
}

// A cast with a gradient holds its weight, and would hold it until the region ends.
TEST_F(CastCacheTest, WeightsThatTheProgramDropsAreFreedInALongRegion) {
  const Autocast region(bf16);
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;
  std::vector<at::Tensor> kept;
  for (int i = 0; i < 600; ++i) {
    const auto dropped = torch::rand({kIn, kOut}).requires_grad_();
    memory.push_back(memory_of(dropped));
    (void)at::mm(x, dropped);
    if (i % 100 == 0) kept.push_back(at::mm(x, dropped));  // whose backward pass is to come
  }
  std::int64_t alive = 0;
  for (const auto& left : memory) alive += left.expired() ? 0 : 1;
  EXPECT_LE(alive, 140) << "of 600";
  for (const at::Tensor& result : kept) result.sum().backward();
}

TEST_F(CastCacheTest, WeightsWithoutMemoryOfTheirOwnAreCastButNotCached) {
  const auto sparse = torch::eye(kIn).to_sparse().requires_grad_();
  const CastRecording casts;
  const Autocast region(CastPolicy::none({torch::kCPU, kBf16}).lower("neg"));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(at::neg(sparse).scalar_type(), kBf16);
  for (const auto& cast : casts->heard()) EXPECT_FALSE(cast.cached);
}

TEST_F(CastCacheTest, IsSharedWithTheThreadsThatWorkForTheRegion) {
  const CastRecording casts;
  const Autocast region(bf16);
  at::mm(x, weight);
  std::thread([&, state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    at::mm(x, weight);
  }).join();
  EXPECT_EQ(casts->cached(kWeight), 1U) << "carried by LibTorch";
  const auto recorder = std::make_shared<test::CastRecorder>();
  std::thread([&, state = AutocastState::current()] {
    const events::Listen listen(recorder);
    const auto scope = state.enter();
    at::mm(x, weight);
  }).join();
  EXPECT_EQ(recorder->cached(kWeight), 1U) << "carried by AutocastState";
}

TEST_F(CastCacheTest, OfTwoThreadsAreTwo) {
  const Autocast region(bf16);
  at::mm(x, weight);
  const auto recorder = std::make_shared<test::CastRecorder>();
  std::thread([&] {
    const events::Listen listen(recorder);
    const Autocast own(bf16);
    at::mm(x, weight);
  }).join();
  EXPECT_EQ(recorder->computed(kWeight), 1U);
  EXPECT_EQ(recorder->cached(kWeight), 0U);
}

}  // namespace
}  // namespace semitone::amp::cast_cache_test
