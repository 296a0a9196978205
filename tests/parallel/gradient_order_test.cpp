// The order in which DistributedDataParallel sums gradients, from one start to the next.

#include "semitone/comm/init.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::parallel::gradient_order_test {
namespace {

using test::all_ways;
using test::expect_error;
using test::Net;
using test::Rank;
using test::run_ranks;
using test::same_bits;
using test::seeded;
using ::testing::SizeIs;

// Five layers of 4 KiB and their biases.
struct DeepImpl : torch::nn::Module {
  DeepImpl() {
    for (int i = 0; i < 5; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(32, 32)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Deep);

using Ddp = DistributedDataParallel<Deep>;

// Buckets of a layer or two.
DistributedDataParallelOptions small_buckets() {
  return DistributedDataParallelOptions().bucket_cap_mb(0.005).first_bucket_mb(0.001);
}

// One step of SGD on this rank's rows. Returns the gradients.
std::vector<at::Tensor> train_step(Deep& model, Ddp& ddp, const comm::Group& group,
                                   std::int64_t step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + group.rank()));
  model->zero_grad();
  ddp.forward(torch::randn({4, 32})).pow(2).sum().backward();
  std::vector<at::Tensor> gradients = test::gradients_of(model->parameters());
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.01);
  return gradients;
}

// Trains an undisturbed run, and one that is started again after some steps. Returns whether the
// gradients of all later steps are equal bit for bit.
bool continues_bit_for_bit(const comm::Group& group, const DistributedDataParallelOptions& options,
                           int interrupted_after, bool with_order) {
  Deep whole = seeded<Deep>(1);
  Deep half = seeded<Deep>(1);
  std::optional<GradientOrder> order;
  Ddp undisturbed(whole, group, options);
  {
    Ddp first(half, group, options);
    for (int step = 0; step < interrupted_after; ++step) {
      train_step(whole, undisturbed, group, step);
      train_step(half, first, group, step);
    }
    order = first.gradient_order();
  }
  Ddp second(half, group, options);
  if (with_order) second.set_gradient_order(order);
  bool equal = true;
  for (int step = interrupted_after; step < interrupted_after + 4; ++step) {
    const auto want = train_step(whole, undisturbed, group, step);
    equal = static_cast<bool>(same_bits(train_step(half, second, group, step), want)) && equal;
  }
  return equal;
}

void expect_order_to_matter(int ranks) {
  run_ranks(ranks, [](Rank&) {
    const auto group = comm::init();
    const auto graph = small_buckets().static_graph(true);
    const auto views = small_buckets().gradient_as_bucket_view(true);
    for (const int steps : {1, 2, 3}) {
      SCOPED_TRACE(steps);
      EXPECT_TRUE(continues_bit_for_bit(group, small_buckets(), steps, true));
      EXPECT_TRUE(continues_bit_for_bit(group, graph, steps, true));
      EXPECT_TRUE(continues_bit_for_bit(group, views, steps, true));
    }
    // Without it some rank has other sums: the test sees the difference.
    EXPECT_FALSE(continues_bit_for_bit(group, small_buckets(), 2, false));
    EXPECT_FALSE(continues_bit_for_bit(group, graph, 2, false));
    // Of a run that has done no step, there is none to be restored.
    EXPECT_TRUE(continues_bit_for_bit(group, small_buckets(), 0, true));
  });
}

TEST(GradientOrder, MakesALaterStartEqualBitForBitWithThreeRanks) {
  expect_order_to_matter(3);
}

TEST(GradientOrder, MakesALaterStartEqualBitForBitWithFourRanks) {
  expect_order_to_matter(4);
}

TEST(GradientOrder, IsKnownAfterTheFirstStepAndStays) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    for (const auto& [name, options] : all_ways()) {
      SCOPED_TRACE(name);
      Deep model = seeded<Deep>(1);
      Ddp ddp(model, group, options);
      EXPECT_EQ(ddp.gradient_order(), std::nullopt);
      train_step(model, ddp, group, 0);
      const auto order = ddp.gradient_order();
      const bool is_fixed = options.find_unused_parameters() || options.delay_allreduce();
      EXPECT_EQ(order.has_value(), !is_fixed);
      train_step(model, ddp, group, 1);
      EXPECT_EQ(ddp.gradient_order(), order);
      train_step(model, ddp, group, 2);
      EXPECT_EQ(ddp.gradient_order(), order);
      if (is_fixed) continue;
      // Nearest to the loss first.
      EXPECT_EQ(order->bucket_cap_mb, options.bucket_cap_mb());
      EXPECT_THAT(order->buckets.front().front(), ::testing::StartsWith("layer4."));
      EXPECT_THAT(order->buckets.back().back(), ::testing::StartsWith("layer0."));
    }
  });
}

// Backward reaches the parameters in the reverse order: the buckets are the given ones, and not
// those of another first step.
TEST(GradientOrder, IsThatWhichWasGivenFromTheFirstStepOn) {
  run_ranks(3, [](Rank&) {
    const auto group = comm::init();
    for (const bool is_static : {false, true}) {
      Deep model = seeded<Deep>(1);
      Ddp ddp(model, group, small_buckets().static_graph(is_static));
      GradientOrder order{{}, 0.005, 0.001};
      for (const auto& item : model->named_parameters()) order.buckets.push_back({item.key()});
      ddp.set_gradient_order(order);
      for (int step = 0; step < 3; ++step) {
        EXPECT_EQ(ddp.gradient_order(), order);
        train_step(model, ddp, group, step);
      }
      EXPECT_EQ(ddp.gradient_order(), order);
    }
  });
}

TEST(GradientOrder, OfOneProcessIsNone) {
  Deep model = seeded<Deep>(1);
  const comm::Group alone;
  Ddp ddp(model, alone);
  ddp.set_gradient_order(GradientOrder{{{"of another model"}}, 1, 1});
  train_step(model, ddp, alone, 0);
  EXPECT_EQ(ddp.gradient_order(), std::nullopt);
}

TEST(GradientOrder, ThatDoesNotFitIsRefused) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Deep model = seeded<Deep>(1);
    model->layers[0]->to(torch::kDouble);
    Ddp ddp(model, group, small_buckets());
    GradientOrder order{{}, 0.005, 0.001};
    for (const auto& item : model->named_parameters()) order.buckets.push_back({item.key()});
    const auto expect_refusal = [&](GradientOrder changed,
                                    std::initializer_list<std::string_view> words) {
      expect_error([&] { ddp.set_gradient_order(std::move(changed)); }, words);
      EXPECT_EQ(ddp.gradient_order(), std::nullopt);
    };
    GradientOrder other = order;
    other.bucket_cap_mb = 25;
    expect_refusal(other, {"[parallel.ddp]",
                           "on rank 0: one for buckets of 25 MiB, the first of 0.001 MiB, "
                           "where the options say 0.005 and 0.001",
                           "bucket sizes"});
    other = order;
    other.buckets.pop_back();
    expect_refusal(other, {"on rank 1: one without 'layer4.bias'"});
    other = order;
    other.buckets.push_back({"layer4.bias"});
    expect_refusal(other,
                   {"one with 'layer4.bias', which is no trained parameter, or is twice in it"});
    other = order;
    other.buckets.push_back({"layer5.bias"});
    expect_refusal(other, {"one with 'layer5.bias', which is no trained parameter"});
    other = order;
    other.buckets.emplace_back();
    expect_refusal(other, {"one with an empty bucket"});
    other = order;
    std::swap(other.buckets[0], other.buckets.back());
    other.buckets.back().push_back("layer1.bias");
    std::erase(other.buckets, std::vector<std::string>{"layer1.bias"});
    expect_refusal(
        other, {"one with 'layer0.weight' (float64 on cpu) and 'layer1.bias' (float32 on cpu)"});
    ddp.set_gradient_order(order);
    EXPECT_EQ(ddp.gradient_order(), order);
    ddp.set_gradient_order(std::nullopt);
    EXPECT_EQ(ddp.gradient_order(), std::nullopt);
  });
}

TEST(GradientOrder, OfBucketsInUseCannotBeChanged) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Deep model = seeded<Deep>(1);
    Ddp ddp(model, group, small_buckets());
    train_step(model, ddp, group, 0);
    train_step(model, ddp, group, 1);
    const auto order = ddp.gradient_order();
    ASSERT_TRUE(order.has_value());
    ASSERT_THAT(order->buckets, SizeIs(3));
    ddp.set_gradient_order(order);
    ddp.set_gradient_order(std::nullopt);
    GradientOrder other = *order;
    std::reverse(other.buckets.begin(), other.buckets.end());
    expect_error([&] { ddp.set_gradient_order(other); },
                 {"[parallel.ddp]", "another one after the first forward"});
    EXPECT_EQ(ddp.gradient_order(), order);
    train_step(model, ddp, group, 2);
  });
}

// Otherwise ranks would sum gradients of different parameters.
TEST(GradientOrder, ThatIsNotEqualOnAllRanksIsAnErrorOnAllOfThem) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    Deep model = seeded<Deep>(1);
    Ddp ddp(model, group, small_buckets());
    GradientOrder order{{}, 0.005, 0.001};
    for (const auto& item : model->named_parameters()) order.buckets.push_back({item.key()});
    const bool differs = rank.number() == 1;
    expect_error([&] { ddp.set_gradient_order(differs ? std::nullopt : std::optional(order)); },
                 {"[parallel.ddp]", "got on rank 1: no bucket 0 of the order"});
    GradientOrder other = order;
    std::swap(other.buckets[2], other.buckets[3]);
    expect_error([&] { ddp.set_gradient_order(differs ? other : order); },
                 {"got on rank 1: bucket 2 of the order is layer1.bias, on rank 0 layer1.weight"});
    other.buckets.pop_back();
    expect_error([&] { ddp.set_gradient_order(differs ? other : order); },
                 {"got on rank 1: one without 'layer4.bias'"});
    EXPECT_EQ(ddp.gradient_order(), std::nullopt);
    ddp.set_gradient_order(order);
    train_step(model, ddp, group, 0);
    EXPECT_EQ(ddp.gradient_order(), order);
  });
}

// A rank that repeats the first step does not ask the others again.
TEST(GradientOrder, SurvivesAFirstStepThatOneRankRepeats) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool is_given : {false, true}) {
      Net model = seeded<Net>(1);
      DistributedDataParallel ddp(model, group);
      const GradientOrder order{
          {{"first.weight", "second.weight"}, {"second.bias", "first.bias"}}, 25, 1};
      if (is_given) ddp.set_gradient_order(order);
      const at::Tensor x = torch::ones({2, 6}, torch::kDouble);
      if (rank.number() == 1) {
        at::Tensor output = ddp.forward(x);
        output.register_hook([](const at::Tensor&) { throw std::runtime_error("out of memory"); });
        EXPECT_THROW(output.sum().backward(), std::runtime_error);
      }
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        ddp.forward(x).sum().backward();
      }
      test::expect_equal_on_all_ranks(group, test::gradients_of(model->parameters()));
      if (is_given) {
        EXPECT_EQ(ddp.gradient_order(), order);
      }
    }
  });
}

// A rank without input has the same buckets.
TEST(GradientOrder, HoldsInAJoinedLoop) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool is_given : {false, true}) {
      Deep model = seeded<Deep>(1);
      Ddp ddp(model, group, small_buckets());
      GradientOrder order{{}, 0.005, 0.001};
      for (const auto& item : model->named_parameters()) order.buckets.push_back({item.key()});
      if (is_given) ddp.set_gradient_order(order);
      ddp.join([&] {
        for (int step = 0; step < rank.number(); ++step) train_step(model, ddp, group, step);
      });
      const auto in_force = ddp.gradient_order();
      ASSERT_TRUE(in_force.has_value());
      EXPECT_EQ(*in_force == order, is_given);
      test::expect_equal_on_all_ranks(group, model->parameters());
    }
  });
}

}  // namespace
}  // namespace semitone::parallel::gradient_order_test
