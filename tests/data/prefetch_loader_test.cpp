#include "semitone/data/prefetch_loader.h"

#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::data {
namespace {

using testing::ElementsAre;

at::Tensor number(std::int64_t value) {
  return torch::full({2}, value, torch::kLong);
}

// A loader of the tensors 0, 1, 2 …, which calls a function before each.
struct Numbers {
  using OnRead = std::function<void(std::int64_t)>;

  struct Iterator {
    const Numbers* numbers;
    std::int64_t at;
    at::Tensor operator*() const {
      if (numbers->on_read) numbers->on_read(at);
      return number(at);
    }
    Iterator& operator++() {
      ++at;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return at != other.at; }
  };
  Iterator begin() const { return {this, 0}; }
  Iterator end() const { return {this, count}; }

  std::int64_t count = 5;
  OnRead on_read = {};
};

PrefetchOptions on_cpu() {
  return {torch::kCPU};
}

template <typename Batches>
std::vector<std::int64_t> read(Batches& batches) {
  std::vector<std::int64_t> values;
  for (at::Tensor& batch : batches) values.push_back(batch[0].template item<std::int64_t>());
  return values;
}

// Both with a thread and without.
class PrefetchLoaderTest : public testing::TestWithParam<bool> {
 protected:
  static PrefetchOptions options() { return on_cpu().background(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(All, PrefetchLoaderTest, testing::Bool(), [](const auto& background) {
  return background.param ? "InBackground" : "InTheCallersThread";
});

TEST_P(PrefetchLoaderTest, TheTimeUntilABatchIsThereIsAPartOfTheStep) {
  const Numbers numbers{2};
  PrefetchLoader batches(numbers, options());
  const test::RecordedEvents events;
  EXPECT_THAT(read(batches), ElementsAre(0, 1));
  EXPECT_EQ(events.phases(), "data() data() data()");  // the last one finds the end
}

TEST_P(PrefetchLoaderTest, EveryPassDeliversTheLoadersBatchesInOrder) {
  const Numbers numbers;
  for (const std::size_t depth : {1U, 2U, 9U}) {
    PrefetchLoader batches(numbers, options().depth(depth));
    for (int pass = 0; pass < 3; ++pass) EXPECT_THAT(read(batches), ElementsAre(0, 1, 2, 3, 4));
  }
  Numbers none{0};
  PrefetchLoader nothing(none, options());
  EXPECT_THAT(read(nothing), ElementsAre());
}

TEST_P(PrefetchLoaderTest, LibTorchsLoadersCanBeRead) {
  struct Squares : torch::data::datasets::Dataset<Squares> {
    torch::data::Example<> get(std::size_t index) override {
      const auto value = static_cast<std::int64_t>(index);
      return {torch::full({3}, value, torch::kFloat), torch::full({}, value * value)};
    }
    std::optional<std::size_t> size() const override { return 10; }
  };
  for (const std::size_t workers : {0U, 2U}) {
    const auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
        Squares().map(torch::data::transforms::Stack<>()),
        torch::data::DataLoaderOptions(4).workers(workers));
    PrefetchLoader batches(*loader, options().dtype(torch::kBFloat16));
    for (int pass = 0; pass < 2; ++pass) {
      std::vector<std::int64_t> squares;
      for (torch::data::Example<>& batch : batches) {
        EXPECT_EQ(batch.data.scalar_type(), torch::kBFloat16);
        EXPECT_TRUE(torch::equal(batch.data.select(1, 0).to(torch::kLong).square(), batch.target));
        for (std::int64_t i = 0; i < batch.target.size(0); ++i)
          squares.push_back(batch.target[i].item<std::int64_t>());
      }
      EXPECT_THAT(squares, ElementsAre(0, 1, 4, 9, 16, 25, 36, 49, 64, 81));
    }
    // Without a collation a batch is a vector of examples.
    const auto examples = torch::data::make_data_loader(Squares(), 5);
    PrefetchLoader vectors(*examples, options().dtype(torch::kHalf));
    for (std::vector<torch::data::Example<>>& batch : vectors) {
      ASSERT_EQ(batch.size(), 5U);
      EXPECT_EQ(batch[4].data.scalar_type(), torch::kHalf);
      EXPECT_EQ(batch[4].target.scalar_type(), torch::kLong);
    }
  }
}

TEST_P(PrefetchLoaderTest, ExceptionsSurfaceAtTheirBatch) {
  std::int64_t bad = 2;
  const Numbers numbers{5, [&](std::int64_t index) {
                          if (index == bad) throw std::out_of_range("no sample");
                        }};
  PrefetchLoader batches(numbers, options().depth(3));
  std::vector<std::int64_t> seen;
  EXPECT_THROW(
      {
        for (at::Tensor& batch : batches) seen.push_back(batch[0].item<std::int64_t>());
      },
      std::out_of_range);
  EXPECT_THAT(seen, ElementsAre(0, 1));

  bad = 0;
  EXPECT_THROW(batches.begin(), std::out_of_range);
  bad = 1;
  auto batch = batches.begin();
  EXPECT_THROW(++batch, std::out_of_range);
  EXPECT_TRUE(batch == batches.end());
  bad = -1;
  EXPECT_THAT(read(batches), ElementsAre(0, 1, 2, 3, 4));
}

TEST_P(PrefetchLoaderTest, APassCanBeLeftEarly) {
  const Numbers numbers{100};
  PrefetchLoader batches(numbers, options());
  for (const at::Tensor& batch : batches) {
    if (batch[0].item<std::int64_t>() == 3) break;
  }
  std::int64_t first = -1;
  for (const at::Tensor& batch : batches) {
    first = batch[0].item<std::int64_t>();
    break;
  }
  EXPECT_EQ(first, 0);
}

TEST_P(PrefetchLoaderTest, AtMostDepthBatchesAreReadAhead) {
  std::atomic<std::int64_t> current = -1;
  std::atomic<std::int64_t> furthest = 0;
  const Numbers numbers{40, [&](std::int64_t index) {
                          if (index - current > furthest) furthest = index - current;
                        }};
  PrefetchLoader batches(numbers, options().depth(3));
  for (const at::Tensor& batch : batches) {
    current = batch[0].item<std::int64_t>();
    std::this_thread::yield();
  }
  // While the loop asks for the next batch, `current` is still the one before.
  EXPECT_LE(furthest, 3 + 1);
}

TEST_P(PrefetchLoaderTest, TransformsSeeEveryMovedBatch) {
  const std::vector<at::Tensor> images{torch::randn({2, 3}), torch::randn({1, 3})};
  PrefetchLoader batches(images, options().dtype(torch::kHalf), [](at::Tensor batch) {
    EXPECT_EQ(batch.scalar_type(), torch::kHalf);
    return batch.mul(2);
  });
  std::size_t count = 0;
  for (const at::Tensor& batch : batches)
    test::expect_bitwise_equal(batch, images[count++].to(torch::kHalf).mul(2));
  EXPECT_EQ(count, 2U);
}

struct Sample {
  at::Tensor image;
  std::string name;
};

TEST_P(PrefetchLoaderTest, BatchesKeepTheirStructure) {
  using Dict = std::map<std::string, at::Tensor>;
  const at::Tensor x = torch::randn({2});
  const std::vector<std::tuple<Sample, Dict, std::pair<at::Tensor, int>>> rows{
      {{x, "first"}, {{"x", x}, {"y", number(3)}}, {at::Tensor(), 7}}};
  PrefetchLoader batches(rows, options().dtype(torch::kBFloat16));
  for (const auto& [sample, dict, pair] : batches) {
    EXPECT_EQ(sample.name, "first");
    test::expect_bitwise_equal(sample.image, x.to(torch::kBFloat16));
    test::expect_bitwise_equal(dict.at("x"), x.to(torch::kBFloat16));
    test::expect_bitwise_equal(dict.at("y"), number(3));
    EXPECT_FALSE(pair.first.defined());
    EXPECT_EQ(pair.second, 7);
  }
  const std::vector<torch::data::Example<std::vector<at::Tensor>, void>> untargeted{
      std::vector<at::Tensor>{x, x}};
  PrefetchLoader parts(untargeted, options().dtype(torch::kBFloat16));
  for (const auto& batch : parts)
    test::expect_bitwise_equal(batch.data.at(1), x.to(torch::kBFloat16));
}

TEST_P(PrefetchLoaderTest, FormatsApplyToTensorsOfTheirDimensions) {
  const std::vector<std::vector<at::Tensor>> rows{
      {torch::randn({2, 3, 4, 5}), torch::randn({2, 1, 4, 5}), torch::randn({2, 3, 4}),
       torch::randn({2, 3, 4, 5, 6}), torch::ones({2, 3, 4, 5}, torch::kByte),
       torch::randn({4, 3}).t()}};
  const auto strides = [&](c10::MemoryFormat format) {
    PrefetchLoader batches(rows, options().memory_format(format));
    const std::vector<at::Tensor> batch = *batches.begin();
    for (std::size_t i = 0; i < batch.size(); ++i)
      test::expect_bitwise_equal(batch[i].contiguous(), rows[0][i].contiguous());
    std::vector<std::vector<std::int64_t>> result;
    for (const at::Tensor& tensor : batch) result.push_back(tensor.strides().vec());
    return result;
  };
  const auto own = strides(c10::MemoryFormat::Preserve);
  EXPECT_THAT(strides(c10::MemoryFormat::ChannelsLast),
              ElementsAre(ElementsAre(60, 1, 15, 3), ElementsAre(20, 1, 5, 1), own[2], own[3],
                          ElementsAre(60, 1, 15, 3), own[5]));
  EXPECT_THAT(strides(c10::MemoryFormat::ChannelsLast3d),
              ElementsAre(own[0], own[1], own[2], ElementsAre(360, 1, 90, 18, 3), own[4], own[5]));
  EXPECT_THAT(own.back(), ElementsAre(1, 3));
  EXPECT_THAT(strides(c10::MemoryFormat::Contiguous).back(), ElementsAre(4, 1));
}

TEST(PrefetchLoaderThreads, TheNextBatchIsReadWhileTheCurrentOneIsInUse) {
  std::mutex mutex;
  std::condition_variable changed;
  std::int64_t last_read = -1;
  const Numbers numbers{4, [&](std::int64_t index) {
                          const std::scoped_lock lock(mutex);
                          last_read = index;
                          changed.notify_all();
                        }};
  PrefetchLoader batches(numbers, on_cpu().depth(1));
  for (const at::Tensor& batch : batches) {
    const std::int64_t next = std::min<std::int64_t>(batch[0].item<std::int64_t>() + 1, 3);
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::minutes(1), [&] { return last_read >= next; }));
  }
}

TEST(PrefetchLoaderThreads, TheLoaderRunsOnOneCoreOfAnotherThread) {
  const int threads = at::get_num_threads();
  std::atomic<bool> is_elsewhere = false;
  std::atomic<int> its_threads = 0;
  const auto caller = std::this_thread::get_id();
  const Numbers numbers{1, [&](std::int64_t) {
                          is_elsewhere = std::this_thread::get_id() != caller;
                          its_threads = at::get_num_threads();
                        }};
  PrefetchLoader ahead(numbers, on_cpu());
  read(ahead);
  EXPECT_TRUE(is_elsewhere);
  EXPECT_EQ(its_threads, 1);
  EXPECT_EQ(at::get_num_threads(), threads);
  PrefetchLoader here(numbers, on_cpu().background(false));
  read(here);
  EXPECT_FALSE(is_elsewhere);
  EXPECT_EQ(its_threads, threads);
}

// The order of a shuffle, of which the model's own draws must be independent.
TEST(PrefetchLoaderThreads, ShufflesDrawTheSameNumbersAsWithoutPrefetching) {
  const auto images = torch::arange(64).to(torch::kFloat);
  struct Rows : torch::data::datasets::Dataset<Rows, torch::data::TensorExample> {
    explicit Rows(at::Tensor its_rows) : rows(std::move(its_rows)) {}
    torch::data::TensorExample get(std::size_t index) override {
      return rows[static_cast<std::int64_t>(index)];
    }
    std::optional<std::size_t> size() const override { return 64; }
    at::Tensor rows;
  };
  const auto loader = torch::data::make_data_loader(
      Rows(images).map(torch::data::transforms::Stack<torch::data::TensorExample>()), 8);
  const auto order = [&](auto& batches) {
    torch::manual_seed(4);
    std::vector<at::Tensor> seen;
    for (auto& batch : batches) {
      seen.push_back(batch.data);
      torch::rand({3});  // the model's
    }
    return torch::cat(seen);
  };
  PrefetchLoader batches(*loader, on_cpu());
  const at::Tensor want = order(*loader);
  test::expect_bitwise_equal(order(batches), want);
  EXPECT_FALSE(torch::equal(want, images));
}

TEST(PrefetchLoaderOptions, ImpossibleOnesAreErrors) {
  Numbers numbers;
  test::expect_error([&] { PrefetchLoader(numbers, on_cpu().depth(0)); },
                     {"[data.prefetch_loader]", "depth of at least 1"});
  test::expect_error([&] { PrefetchLoader(numbers, on_cpu().dtype(torch::kLong)); },
                     {"a floating-point dtype", "int64"});
  if (!torch::cuda::is_available()) {
    test::expect_error([&] { PrefetchLoader(numbers, torch::kCUDA); },
                       {"a device cuda", "or the CPU"});
  }
  EXPECT_EQ(PrefetchLoader(numbers, torch::kCPU).options().device(), torch::kCPU);
}

}  // namespace
}  // namespace semitone::data
