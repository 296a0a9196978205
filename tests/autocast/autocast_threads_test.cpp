// Regions and other threads.

#include "semitone/autocast/autocast.h"
#include "tests/autocast/autocast_fixture.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <future>
#include <latch>
#include <optional>
#include <thread>
#include <vector>

namespace semitone::amp::autocast_test {
namespace {

c10::ScalarType on_launched_task() {
  std::promise<c10::ScalarType> promise;
  at::launch([&promise] { promise.set_value(product_dtype()); });
  return promise.get_future().get();
}

c10::ScalarType on_new_thread() {
  c10::ScalarType dtype = kFp32;
  std::thread([&dtype] { dtype = product_dtype(); }).join();
  return dtype;
}

TEST(AutocastThreads, LibTorchsHelpersAreInTheRegion) {
  const Autocast region(CastPolicy::semitone({kCpu, kFp16}).keep_fp32("mm"));
  EXPECT_EQ(on_launched_task(), kFp32) << "the policy comes along, not only the dtype";
  const Autocast inner(kCpu, kFp16);
  EXPECT_EQ(on_launched_task(), kFp16);
}

TEST(AutocastThreads, BackwardSeesTheRegionThatBackwardIsCalledIn) {
  struct Spy : torch::autograd::Function<Spy> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
      return x * 2;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   const torch::autograd::variable_list& grads) {
      EXPECT_EQ(product_dtype(), kFp16);
      return {grads[0] * 2};
    }
  };
  const auto x = torch::ones({2}).requires_grad_();
  const Autocast region(kCpu, kFp16);
  Spy::apply(x).sum().backward();
}

TEST(AutocastThreads, AThreadOfOnesOwnIsInNoRegion) {
  const Autocast region(kCpu, kFp16);
  EXPECT_EQ(on_new_thread(), kFp32);
}

TEST(AutocastState, TakesTheRegionsToAnotherThread) {
  const Autocast region(CastPolicy::semitone({kCpu, kFp16}));
  const auto state = AutocastState::current();
  std::thread([&state] {
    {
      const auto scope = state.enter();
      EXPECT_TRUE(autocast_enabled(kCpu));
      EXPECT_EQ(autocast_dtype(kCpu), kFp16);
      EXPECT_EQ(product_dtype(), kFp16);
    }
    EXPECT_FALSE(autocast_enabled(kCpu));
    EXPECT_EQ(product_dtype(), kFp32);
  }).join();
}

TEST(AutocastState, WorksInParallelForOnEveryWorker) {
  const Autocast region(kCpu, kFp16);
  std::atomic<int> wrong = 0;
  at::parallel_for(
      0, 64, 1, [state = AutocastState::current(), &wrong](std::int64_t begin, std::int64_t end) {
        const auto scope = state.enter();
        for (std::int64_t i = begin; i < end; ++i) wrong += product_dtype() == kFp16 ? 0 : 1;
      });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(product_dtype(), kFp16);
}

// As a server does, whose workers share the casts of the weights.
TEST(AutocastState, EvaluatesAModelOnSeveralThreads) {
  torch::nn::Sequential model(torch::nn::Linear(32, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 8));
  const Autocast region(CastPolicy::semitone({kCpu, kBf16}).bind(*model));
  const at::Tensor input = torch::randn({4, 32});
  const at::Tensor want = model->forward(input).detach();
  ASSERT_EQ(want.scalar_type(), kBf16);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> workers;
  for (int i = 0; i < 4; ++i) {
    workers.emplace_back([&, state = AutocastState::current()] {
      const auto scope = state.enter();
      const c10::InferenceMode inference;
      for (int request = 0; request < 50; ++request)
        wrong += torch::equal(model->forward(input), want) ? 0 : 1;
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(wrong, 0);
}

TEST(AutocastState, OutlivesTheRegion) {
  const auto state = [] {
    const Autocast region(kCpu, kFp16);
    return AutocastState::current();
  }();
  EXPECT_EQ(product_dtype(), kFp32);
  const AutocastState copy = state;
  const auto scope = copy.enter();
  EXPECT_EQ(product_dtype(), kFp16);
}

TEST(AutocastState, ReplacesTheRegionsOfTheThreadThatEnters) {
  const auto state = [] {
    const Autocast region(torch::kCUDA, kFp16);
    return AutocastState::current();
  }();
  const Autocast own(kCpu, kBf16);
  {
    const auto scope = state.enter();
    EXPECT_EQ(product_dtype(), kFp32) << "the state has no region of the CPU";
    EXPECT_TRUE(autocast_enabled(torch::kCUDA));
    const auto back = AutocastState::current();
    EXPECT_FALSE(autocast_enabled(kCpu));
  }
  EXPECT_EQ(product_dtype(), kBf16);
  EXPECT_FALSE(autocast_enabled(torch::kCUDA));
}

TEST(AutocastState, DisabledIsNoRegionAtAll) {
  const Autocast region(kCpu, kBf16);
  {
    const auto scope = AutocastState::disabled().enter();
    EXPECT_EQ(product_dtype(), kFp32);
    EXPECT_FALSE(autocast_enabled(kCpu));
    const Autocast inside(kCpu, kFp16);
    EXPECT_EQ(product_dtype(), kFp16);
  }
  EXPECT_EQ(product_dtype(), kBf16);
}

TEST(AutocastState, RemembersWhatIsTurnedOff) {
  const Autocast region(kCpu, kBf16);
  const auto disabled_casts = [] {
    const DisableCasts disabled;
    return AutocastState::current();
  }();
  const auto disabled_region = [] {
    const Autocast off(kCpu, std::nullopt, false);
    return AutocastState::current();
  }();
  for (const auto& state : {disabled_casts, disabled_region}) {
    const auto scope = state.enter();
    EXPECT_EQ(product_dtype(), kFp32);
  }
  EXPECT_EQ(product_dtype(), kBf16);
}

TEST(AutocastState, EntersAlsoUnderDisableCastsAndUnderLibTorchsOwnRegion) {
  const auto state = [] {
    const Autocast region(kCpu, kFp16);
    return AutocastState::current();
  }();
  {
    const DisableCasts disabled;
    const auto scope = state.enter();
    EXPECT_EQ(product_dtype(), kFp16);
  }
  at::autocast::set_autocast_enabled(kCpu, true);
  {
    const auto scope = AutocastState::disabled().enter();
    EXPECT_EQ(product_dtype(), kFp32);
  }
  EXPECT_EQ(product_dtype(), kBf16);
  at::autocast::set_autocast_enabled(kCpu, false);
  at::autocast::clear_cache();
  EXPECT_EQ(product_dtype(), kFp32);
}

// The work of one thread in the following tests: its own policy, checked repeatedly.
struct Worker {
  CastPolicy policy;
  c10::ScalarType product;
  c10::ScalarType softmax;  // of a 16-bit tensor
  c10::ScalarType relu;     // of an fp32 tensor
};

std::vector<Worker> workers() {
  std::vector<Worker> all;
  all.push_back({CastPolicy::torch({kCpu, kBf16}), kBf16, kBf16, kFp32});
  all.push_back({CastPolicy::semitone({kCpu, kFp16}), kFp16, kFp32, kFp32});
  all.push_back({CastPolicy::apex({kCpu, kBf16}).lower("relu"), kBf16, kFp32, kBf16});
  all.push_back({CastPolicy::paddle({kCpu, kFp16}).keep_fp32("mm"), kFp32, kFp32, kFp32});
  all.push_back({CastPolicy::none({kCpu, kBf16}).lower("softmax"), kFp32, kBf16, kFp32});
  return all;
}

void work(const Worker& worker, int iterations, std::atomic<int>& wrong) {
  const auto x = torch::ones({4, 4});
  const auto low = x.to(worker.policy.dtype());
  const auto weight = torch::ones({4, 4}).requires_grad_();
  for (int i = 0; i < iterations; ++i) {
    const Autocast region(worker.policy);
    const auto y = at::mm(x, weight);
    wrong += y.scalar_type() == worker.product ? 0 : 1;
    wrong += y[0][0].item<float>() == 4 ? 0 : 1;
    wrong += at::softmax(low, 0).scalar_type() == worker.softmax ? 0 : 1;
    wrong += at::relu(x).scalar_type() == worker.relu ? 0 : 1;
  }
}

// In its own process, which is the test amp_test.first_use.threads, this is also the first use of
// every policy: kernels are installed while other threads run operators.
TEST(AutocastConcurrency, ThreadsHaveTheirOwnPoliciesFromTheFirstUseOn) {
  const std::vector<Worker> all = workers();
  std::atomic<int> wrong = 0;
  std::latch start(static_cast<std::ptrdiff_t>(all.size()));
  std::vector<std::thread> threads;
  for (const Worker& worker : all) {
    threads.emplace_back([&worker, &start, &wrong] {
      start.arrive_and_wait();
      work(worker, 300, wrong);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(AutocastConcurrency, LibTorchsOwnRegionsRunBesideOurs) {
  std::atomic<int> wrong = 0;
  std::atomic<bool> done = false;
  std::latch start(2);
  std::thread stock([&] {
    at::set_num_threads(1);
    const auto x = torch::ones({4, 4});
    start.arrive_and_wait();
    while (!done) {
      at::autocast::set_autocast_dtype(kCpu, kFp16);
      at::autocast::set_autocast_enabled(kCpu, true);
      wrong += at::mm(x, x).scalar_type() == kFp16 ? 0 : 1;
      wrong += at::softmax(x.to(kFp16), 0).scalar_type() == kFp16 ? 0 : 1;
      wrong += at::mse_loss(x.to(kFp16), x).scalar_type() == kFp32 ? 0 : 1;
      at::autocast::set_autocast_enabled(kCpu, false);
      at::autocast::clear_cache();
      wrong += at::mm(x, x).scalar_type() == kFp32 ? 0 : 1;
    }
  });
  start.arrive_and_wait();
  for (const Worker& worker : workers()) work(worker, 100, wrong);
  done = true;
  stock.join();
  EXPECT_EQ(wrong, 0);
}

TEST(AutocastConcurrency, OneRegionServesManyCarriedThreads) {
  torch::nn::Linear linear(8, 8);
  const auto x = torch::rand({4, 8});
  const Autocast region(CastPolicy::semitone({kCpu, kBf16}).bind(linear));
  const at::Tensor want = linear(x).detach();
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, state = AutocastState::current(), i] {
      const auto scope = state.enter();
      for (int repeat = 0; repeat < 200; ++repeat) {
        const torch::AutoGradMode grad((repeat + i) % 2 == 0);
        if (repeat % 50 == 49) clear_cast_cache();
        const auto y = linear(x);
        wrong += y.requires_grad() == ((repeat + i) % 2 == 0) ? 0 : 1;
        wrong += at::equal(y, want) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace semitone::amp::autocast_test
