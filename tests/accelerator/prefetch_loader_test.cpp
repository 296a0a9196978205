#include "semitone/data/prefetch_loader.h"

#include "semitone/optim/fused_sgd.h"
#include "tests/accelerator/training.h"
#include "tests/support/errors.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/data.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::test::accelerator {
namespace {

using data::PrefetchLoader;
using data::PrefetchOptions;
using Example = torch::data::Example<>;

std::vector<Example> examples(int count) {
  torch::manual_seed(3);
  std::vector<Example> result;
  for (int i = 0; i < count; ++i)
    result.emplace_back(torch::randn({4, 3, 5, 5}), torch::randint(7, {4}));
  return result;
}

struct AcceleratorPrefetch : AcceleratorTest, testing::WithParamInterface<bool> {
  static PrefetchOptions options(c10::DeviceIndex index = 0) {
    return PrefetchOptions(device(index)).background(GetParam());
  }
};

INSTANTIATE_TEST_SUITE_P(All, AcceleratorPrefetch, testing::Bool(), [](const auto& background) {
  return background.param ? "InBackground" : "InTheCallersThread";
});

TEST_P(AcceleratorPrefetch, BatchesArriveWithoutAWaitOfTheHost) {
  const auto loader = examples(6);
  const Counts before = counts();
  std::vector<at::Tensor> sums;
  {
    PrefetchLoader batches(loader, options());
    for (int pass = 0; pass < 2; ++pass) {
      for (const Example& batch : batches) {
        EXPECT_EQ(batch.data.device(), device());
        EXPECT_EQ(batch.target.device(), device());
        sums.push_back(batch.data.sum() + batch.target.sum());
      }
    }
  }
  const Counts spent = counts() - before;
  EXPECT_EQ(spent.reads, 0);
  EXPECT_EQ(spent.waits, 0);
  EXPECT_EQ(spent.uploads, 0);
  EXPECT_EQ(spent.unpinned_async_copies, 0);
  ASSERT_EQ(sums.size(), 12U);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const Example& source = loader[i % 6];
    expect_bitwise_equal(sums[i].cpu(), source.data.sum() + source.target.sum());
  }
}

TEST_P(AcceleratorPrefetch, CastsAndFormatsAreThoseOfTheHost) {
  const auto x = torch::randn({2, 3, 4, 5});
  using Batch = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  const std::vector<Batch> loader{{x, x.to(at::kDouble), x.to(at::kBFloat16), x.to(at::kLong),
                                   x.expand({2, 3, 4, 5}).transpose(0, 2), torch::empty({0, 3})}};
  const auto want = [](const at::Tensor& tensor) {
    const at::Tensor cast = tensor.is_floating_point() ? tensor.to(at::kHalf) : tensor;
    return tensor.dim() == 4 ? cast.clone(at::MemoryFormat::ChannelsLast) : cast;
  };
  PrefetchLoader batches(loader,
                         options().dtype(at::kHalf).memory_format(at::MemoryFormat::ChannelsLast));
  const Counts before = counts();
  for (const Batch& batch : batches) {
    EXPECT_EQ((counts() - before).unpinned_async_copies, 0);
    const auto compare = [&](const at::Tensor& got, const at::Tensor& source) {
      EXPECT_EQ(got.device(), device());
      EXPECT_EQ(got.strides(), want(source).strides());
      expect_bitwise_equal(got.cpu().contiguous(), want(source).contiguous());
    };
    const Batch& source = loader[0];
    compare(std::get<0>(batch), std::get<0>(source));
    compare(std::get<1>(batch), std::get<1>(source));
    compare(std::get<2>(batch), std::get<2>(source));
    compare(std::get<3>(batch), std::get<3>(source));
    compare(std::get<4>(batch), std::get<4>(source));
    compare(std::get<5>(batch), std::get<5>(source));
  }
}

TEST_P(AcceleratorPrefetch, PinnedTensorsAreCopiedDirectly) {
  const auto pin = [](const at::Tensor& tensor) {
    const auto pinned = torch::empty(tensor.sizes(), tensor.options().pinned_memory(true));
    return pinned.copy_(tensor);
  };
  const auto x = torch::randn({4, 6});
  const std::vector<std::pair<at::Tensor, at::Tensor>> loader{{pin(x), pin(x).narrow(1, 1, 3)}};
  PrefetchLoader batches(loader, options().dtype(at::kHalf));
  const Counts before = counts();
  for (const auto& [whole, part] : batches) {
    EXPECT_EQ((counts() - before).unpinned_async_copies, 0);
    EXPECT_EQ((counts() - before).uploads, 0);
    expect_bitwise_equal(whole.cpu(), x.to(at::kHalf));
    expect_bitwise_equal(part.cpu(), x.to(at::kHalf).narrow(1, 1, 3));
  }
}

TEST_P(AcceleratorPrefetch, OtherDevicesAndStreamsCanBeUsed) {
  const auto loader = examples(4);
  const c10::impl::VirtualGuardImpl guard(kType);
  const c10::Stream stream = guard.getStreamFromGlobalPool(device(1));
  std::vector<at::Tensor> sums;
  {
    const c10::StreamGuard on_stream(stream);
    PrefetchLoader batches(loader, options(1));
    for (const Example& batch : batches) sums.push_back(batch.data.sum());
    EXPECT_EQ(batches.options().device(), device(1));
    EXPECT_EQ(PrefetchLoader(loader, kType).options().device(), device(1));
    for (std::size_t i = 0; i < sums.size(); ++i)
      expect_bitwise_equal(sums[i].cpu(), loader[i].data.sum());
  }
  EXPECT_EQ(PrefetchLoader(loader, kType).options().device(), device(0));
  expect_error([&] { PrefetchLoader(loader, device(2)); }, {"accelerator:2", "got 2"});
}

// A loader that keeps none of the tensors that it has yielded.
struct Draining {
  struct Iterator {
    std::vector<at::Tensor>* tensors;
    std::size_t at;
    at::Tensor operator*() const { return std::move((*tensors)[at]); }
    Iterator& operator++() {
      ++at;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return at != other.at; }
  };
  Iterator begin() { return {&tensors, 0}; }
  Iterator end() { return {&tensors, tensors.size()}; }

  std::vector<at::Tensor> tensors;
};

// The side stream follows what was launched before the pass. The memory that it reads is kept for
// it.
TEST_P(AcceleratorPrefetch, TensorsOfTheDeviceCanBeRead) {
  const auto rows = torch::arange(12).to(at::kFloat);
  Draining loader;
  for (int i = 0; i < 4; ++i) loader.tensors.push_back(rows.to(device()) * i);
  std::vector<at::Tensor> got;
  PrefetchLoader batches(loader, options().dtype(at::kHalf));
  for (const at::Tensor& batch : batches) got.push_back(batch + 1);
  ASSERT_EQ(got.size(), 4U);
  for (std::size_t i = 0; i < 4; ++i)
    expect_bitwise_equal(got[i].cpu(), (rows * static_cast<double>(i)).to(at::kHalf) + 1);
}

TEST_P(AcceleratorPrefetch, BatchesThatWereReadAheadMayBeDropped) {
  const auto loader = examples(9);
  PrefetchLoader batches(loader, options().depth(3));
  for (const Example& batch : batches) {
    batch.data.add_(1);
    break;
  }
  EXPECT_EQ(batches.begin()->target.sizes(), at::IntArrayRef({4}));
}

TEST_P(AcceleratorPrefetch, ExceptionsSurfaceAtTheirBatch) {
  const auto loader = examples(4);
  int read = 0;
  PrefetchLoader batches(loader, options(), [&](Example batch) {
    if (++read == 3) throw std::out_of_range("the third batch");
    return batch;
  });
  int seen = 0;
  EXPECT_THROW(
      {
        for (const Example& batch : batches) {
          batch.data.add_(1);
          ++seen;
        }
      },
      std::out_of_range);
  EXPECT_EQ(seen, 2);
}

// A training reads its batches from a PrefetchLoader, as `train` makes them.
TEST_P(AcceleratorPrefetch, ATrainingReadsTheSameNumbers) {
  constexpr int kSteps = 5;
  const auto options_of_amp = amp::Options("O2").dtype(at::kHalf).loss_scale(128.0).verbosity(0);
  const auto make = [](std::vector<at::Tensor> parameters) {
    return std::make_unique<optim::FusedSGD>(std::move(parameters), optim::FusedSGDOptions(0.1));
  };
  const Trained want =
      train({.device = device(), .options = options_of_amp, .make = make, .steps = kSteps});
  std::vector<at::Tensor> loader;
  for (int i = 0; i < kSteps; ++i) loader.push_back(input_of(i, at::kCPU));

  auto net = make_net(device());
  const auto optimizer = make(net->parameters());
  auto mixed = amp::initialize(net, *optimizer, options_of_amp);
  PrefetchLoader batches(loader, options());
  std::vector<double> losses;
  for (const at::Tensor& input : batches) {
    optimizer->zero_grad();
    const auto loss = loss_of(mixed.forward(net, input), input);
    mixed.scale_loss(loss, *optimizer).backward();
    mixed.step(*optimizer);
    losses.push_back(loss.item<double>());
  }
  EXPECT_EQ(losses, want.losses);
}

}  // namespace
}  // namespace semitone::test::accelerator
