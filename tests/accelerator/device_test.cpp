#include "tests/support/accelerator/accelerator.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdio>
#include <sstream>

// What the pretend accelerator finds: without these tests, silence of the others proves nothing.
namespace semitone::test::accelerator {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

struct Accelerator : AcceleratorTest {
  // Another stream than the current one.
  static c10::Stream side(c10::DeviceIndex index = 0) {
    return c10::impl::VirtualGuardImpl(kType).getStreamFromGlobalPool(device(index));
  }
  static c10::Stream main_stream(c10::DeviceIndex index = 0) {
    return c10::impl::VirtualGuardImpl(kType).getStream(device(index));
  }
};

at::Tensor pinned(at::IntArrayRef size) {
  return torch::zeros(size, torch::TensorOptions().pinned_memory(true));
}

TEST_F(Accelerator, ComputesAsTheCPUDoes) {
  torch::manual_seed(1);
  const auto a = torch::randn({5, 7}), b = torch::randn({7, 3});
  const auto got = torch::relu(a.to(device()).matmul(b.to(device()))).t().sum(1);
  EXPECT_EQ(got.device(), device());
  expect_bitwise_equal(got.cpu(), torch::relu(a.matmul(b)).t().sum(1));
}

TEST_F(Accelerator, ViewsShareMemory) {
  auto whole = torch::zeros({4, 6}, device());
  whole.narrow(1, 2, 3).t().select(0, 1).add_(1);
  whole.view({24}).slice(0, 0, 24, 6).fill_(2);
  auto want = torch::zeros({4, 6});
  want.narrow(1, 2, 3).t().select(0, 1).add_(1);
  want.view({24}).slice(0, 0, 24, 6).fill_(2);
  expect_bitwise_equal(whole.cpu(), want);
}

TEST_F(Accelerator, OutputsAreResized) {
  auto out = torch::empty({0}, device());
  const auto a = torch::ones({3, 4}, device());
  torch::add_out(out, a, a);
  expect_bitwise_equal(out.cpu(), torch::full({3, 4}, 2.));
  out.resize_({5, 5}).fill_(3);
  expect_bitwise_equal(out.cpu(), torch::full({5, 5}, 3.));
}

TEST_F(Accelerator, GradientsAreTheCPUs) {
  torch::manual_seed(1);
  torch::nn::Sequential host(torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3)),
                             torch::nn::BatchNorm2d(4), torch::nn::ReLU(), torch::nn::Flatten(),
                             torch::nn::Linear(64, 3));
  torch::nn::Sequential there;
  {
    std::stringstream stream;
    torch::save(host, stream);
    there = torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3)),
                                  torch::nn::BatchNorm2d(4), torch::nn::ReLU(),
                                  torch::nn::Flatten(), torch::nn::Linear(64, 3));
    torch::load(there, stream);
  }
  move(*there, device());
  const auto x = torch::randn({8, 2, 6, 6});
  const auto target = torch::arange(8).remainder(3);
  torch::nn::functional::cross_entropy(host->forward(x), target).backward();
  torch::nn::functional::cross_entropy(there->forward(x.to(device())), target.to(device()))
      .backward();
  const auto want = host->parameters(), got = there->parameters();
  for (std::size_t i = 0; i < want.size(); ++i)
    EXPECT_TRUE(near(got[i].grad().cpu(), want[i].grad(), 1e-5)) << i;
  expect_bitwise_equal(there->buffers()[0].cpu(), host->buffers()[0]);
}

using AcceleratorDeathTest = Accelerator;

TEST_F(AcceleratorDeathTest, TheHostMayNotReadItsMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto tensor = torch::ones({4}, device());
  EXPECT_DEATH(std::printf("%f", static_cast<double>(*tensor.const_data_ptr<float>())),
               "host code touched memory of the pretend accelerator");
}

TEST_F(AcceleratorDeathTest, TheHostMayNotWriteItsMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto tensor = torch::ones({4}, device());
  EXPECT_DEATH(*tensor.mutable_data_ptr<float>() = 1,
               "host code touched memory of the pretend accelerator");
}

TEST_F(Accelerator, NewMemoryHoldsNaNs) {
  EXPECT_TRUE(torch::empty({8}, device()).isnan().all().item<bool>());
}

TEST_F(Accelerator, UnorderedReadsAfterWritesAreErrors) {
  auto tensor = torch::zeros({4}, device());
  synchronize();
  tensor.add_(1);
  const c10::StreamGuard guard(side());
  EXPECT_THAT(message_of<c10::Error>([&] { tensor.sum(); }),
              AllOf(HasSubstr("sum"), HasSubstr("does not wait for aten::add"),
                    HasSubstr("accelerator:0 stream 0")));
  EXPECT_EQ(take_errors().size(), 1U);
}

TEST_F(Accelerator, UnorderedWritesAfterReadsAreErrors) {
  auto tensor = torch::zeros({4}, device());
  synchronize();
  const auto sum = tensor.sum();
  const c10::StreamGuard guard(side());
  EXPECT_THAT(message_of<c10::Error>([&] { tensor.add_(1); }), HasSubstr("aten::sum that reads"));
  EXPECT_EQ(take_errors().size(), 1U);
}

TEST_F(Accelerator, UnorderedReadsOfTheSameMemoryAreFine) {
  const auto tensor = torch::ones({4}, device());
  synchronize();
  const auto sum = tensor.sum();
  const c10::StreamGuard guard(side());
  EXPECT_EQ(tensor.sum().item<float>(), 4);
  synchronize();
}

TEST_F(Accelerator, EventsOrderStreams) {
  auto tensor = torch::ones({4}, device());
  c10::Event event(kType);
  event.record(main_stream());
  const auto other = side();
  event.block(other);
  const c10::StreamGuard guard(other);
  EXPECT_EQ(tensor.sum().item<float>(), 4);
  synchronize();
}

TEST_F(Accelerator, AnEventOrdersOnlyWhatWasBeforeIt) {
  auto tensor = torch::ones({4}, device());
  c10::Event event(kType);
  event.record(main_stream());
  tensor.add_(1);
  const auto other = side();
  event.block(other);
  const c10::StreamGuard guard(other);
  EXPECT_THROW(tensor.sum(), c10::Error);
  EXPECT_EQ(take_errors().size(), 1U);
  synchronize();
}

TEST_F(Accelerator, MemoryThatAnotherStreamUsesMayNotBeFreed) {
  auto tensor = torch::ones({4}, device());
  synchronize();
  {
    const c10::StreamGuard guard(side());
    tensor.add_(1);
  }
  tensor.reset();
  EXPECT_THAT(take_errors(), ElementsAre(HasSubstr("without record_stream")));
}

TEST_F(Accelerator, RecordedStreamsKeepMemory) {
  auto tensor = torch::ones({4}, device());
  synchronize();
  {
    const auto other = side();
    const c10::StreamGuard guard(other);
    tensor.add_(1);
    tensor.record_stream(other);
  }
  tensor.reset();
  EXPECT_THAT(take_errors(), ElementsAre());
}

TEST_F(Accelerator, NonBlockingCopiesArriveWhenTheHostWaits) {
  const auto tensor = torch::ones({4}, device());
  auto host = pinned({4});
  const auto before = host_reads();
  host.copy_(tensor, true);
  EXPECT_EQ(host_reads(), before);
  EXPECT_TRUE(host.isnan().all().item<bool>());
  c10::Event event(kType);
  event.record(main_stream());
  event.synchronize();
  expect_bitwise_equal(host, torch::ones({4}));
}

TEST_F(Accelerator, SourcesOfNonBlockingCopiesMayNotChange) {
  auto host = pinned({4});
  const auto tensor = host.to(device(), true);
  host.fill_(1);
  synchronize();
  EXPECT_THAT(take_errors(), ElementsAre(HasSubstr("changed pinned memory")));
}

TEST_F(Accelerator, NonBlockingCopiesWithoutPinnedMemoryAreCounted) {
  const auto before = counts();
  const auto tensor = torch::ones({4}).to(device(), true);
  tensor.to(at::kCPU, true);
  EXPECT_EQ(counts().unpinned_async_copies - before.unpinned_async_copies, 1);
}

TEST_F(Accelerator, TensorsOfTwoDevicesAreErrors) {
  const auto a = torch::ones({4}, device(0)), b = torch::ones({4}, device(1));
  EXPECT_THAT(message_of<c10::Error>([&] { torch::dot(a, b); }), HasSubstr("accelerator:1"));
  EXPECT_THROW(torch::dot(a, torch::ones({4})), c10::Error);
  take_errors();
}

TEST_F(Accelerator, CopiesBetweenDevicesFollowBothStreams) {
  auto a = torch::ones({4}, device(0));
  auto b = a.to(device(1), true);
  b.add_(1);
  a.copy_(b);
  expect_bitwise_equal(a.cpu(), torch::full({4}, 2.));
}

TEST_F(Accelerator, ReadsOfTheHostAreCounted) {
  const auto tensor = torch::ones({4}, device());
  const auto before = host_reads();
  const auto twice = tensor + tensor;
  const auto part = twice[2];
  EXPECT_EQ(host_reads(), before);
  EXPECT_EQ(part.item<float>(), 2);
  EXPECT_EQ(host_reads(), before + 1);
  EXPECT_TRUE(torch::equal(twice, twice));
  EXPECT_EQ(host_reads(), before + 2);
}

}  // namespace
}  // namespace semitone::test::accelerator
