#include "semitone/amp/accumulate.h"

#include "semitone/amp/initialize.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_sgd.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp::accumulate_test {
namespace {

using test::copies;
using test::expect_error;
using test::gradients_of;
using test::same_bits;

constexpr std::int64_t kRows = 8;

// A training of a small net at some level, with a fixed batch.
struct Training {
  explicit Training(const char* level, c10::ScalarType dtype = torch::kBFloat16)
      : mixed(initialize(net, optimizer,
                         Options(level).dtype(dtype).loss_scale("dynamic").verbosity(0))) {}

  static test::ToyNet make_net() {
    torch::manual_seed(3);
    return test::ToyNet(test::ToyNetOptions{.activation = at::tanh});
  }

  at::Tensor loss_of(std::int64_t part, std::int64_t parts) {
    const std::int64_t rows = kRows / parts;
    const auto slice = [&](const at::Tensor& all) {
      return all.slice(0, part * rows, (part + 1) * rows);
    };
    const auto output = mixed.forward(net, slice(x));
    return torch::mse_loss(output.to(torch::kFloat), slice(y));
  }

  at::Tensor accumulate(std::int64_t parts) {
    return amp::accumulate(mixed, optimizer, parts,
                           [&](std::int64_t i) { return loss_of(i, parts); });
  }

  std::vector<at::Tensor> gradients() {
    return copies(gradients_of(mixed.master_params(optimizer)));
  }

  at::Tensor x = (torch::manual_seed(4), torch::randn({kRows, 6}));
  at::Tensor y = torch::randn({kRows, 3});
  test::ToyNet net = make_net();
  torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.1)};
  MixedPrecision mixed;
};

// Each gradient is a sum over the rows, in another order.
TEST(Accumulate, EqualsOneLargeBatchInFp32) {
  Training whole("O0");
  const at::Tensor loss = whole.loss_of(0, 1);
  whole.mixed.scale_loss(loss, whole.optimizer).backward();
  for (const std::int64_t parts : {1, 2, 4, 8}) {
    Training parted("O0");
    const at::Tensor mean = parted.accumulate(parts);
    const double tolerance = test::reduction_tolerance(torch::kFloat, kRows);
    EXPECT_TRUE(test::near(parted.gradients(), whole.gradients(), tolerance)) << parts;
    EXPECT_TRUE(test::near(mean, loss.detach(), tolerance)) << parts;
    EXPECT_FALSE(mean.requires_grad());
    EXPECT_EQ(parted.mixed.step(parted.optimizer), Step::stepped);
  }
}

// What is rounded to 16 bits is the gradient of a micro-batch. At O3 the sum is, too: before the last
// micro-batch, and with it.
TEST(Accumulate, AddsInFp32AtEveryLevel) {
  constexpr std::int64_t kParts = 4;
  for (const char* level : test::kLevels) {
    for (const auto dtype : test::kDtypes) {
      SCOPED_TRACE(std::string(level) + " " + c10::toString(dtype));
      const auto gradients = std::string(level) == "O3" ? dtype : torch::kFloat;
      Training parted(level, dtype);
      std::vector<at::Tensor> want;
      for (std::int64_t i = 0; i < kParts; ++i) {
        const at::Tensor share = parted.loss_of(i, kParts) / kParts;
        parted.mixed.scale_loss(share, parted.optimizer).backward();
        const auto one = parted.gradients();
        for (std::size_t k = 0; k < one.size(); ++k) {
          EXPECT_EQ(one[k].scalar_type(), gradients);
          const at::Tensor in_fp32 = one[k].to(torch::kFloat);
          if (i == 0) {
            want.push_back(in_fp32);
            continue;
          }
          if (i == kParts - 1) want[k] = want[k].to(gradients);
          want[k] = want[k].to(torch::kFloat) + in_fp32;
        }
        parted.mixed.zero_grad(parted.optimizer);
      }
      for (at::Tensor& one : want) one = one.to(gradients);
      parted.accumulate(kParts);
      EXPECT_TRUE(same_bits(parted.gradients(), want));
    }
  }
}

// A wrapper that records when it may communicate.
struct Recorder {
  struct Silence {
    explicit Silence(bool& given) : silent(given) { silent = true; }
    Silence(const Silence&) = delete;
    Silence& operator=(const Silence&) = delete;
    ~Silence() { silent = false; }
    bool& silent;
  };
  Silence no_sync() { return Silence(silent); }
  bool silent = false;
};

// A weight whose gradient is 1 in the first micro-batch, and 1/512 in the others. bf16 has no number
// between 1 and 1 + 1/128: added in 16 bits, the sum would remain 1.
struct SmallShares {
  static constexpr std::int64_t kParts = 16;

  explicit SmallShares(const char* level, bool split)
      : optimizer(net->parameters(), optim::FusedSGDOptions(0.1).split_master(split)),
        mixed(initialize(net, optimizer, Options(level).loss_scale(128.0).verbosity(0))) {}

  at::Tensor loss_of(std::int64_t part) {
    const at::Tensor input = torch::full({1, 1}, part == 0 ? 1.0 : 1.0 / 512);
    return mixed.forward(net, input).to(torch::kFloat).sum() * kParts;
  }

  at::Tensor gradient() { return net->weight.grad().detach(); }

  torch::nn::Linear net{torch::nn::LinearOptions(1, 1).bias(false)};
  optim::FusedSGD optimizer;
  MixedPrecision mixed;
};

TEST(Accumulate, LosesNoSmallGradientsOf16Bits) {
  for (const auto& [level, split] : {std::pair{"O3", false}, std::pair{"O2", true}}) {
    SCOPED_TRACE(level);
    SmallShares training(level, split);
    Recorder wrapper;
    for (const bool communicates : {false, true}) {
      const auto loss_of = [&](std::int64_t i) { return training.loss_of(i); };
      communicates
          ? amp::accumulate(training.mixed, training.optimizer, wrapper, SmallShares::kParts,
                            loss_of)
          : amp::accumulate(training.mixed, training.optimizer, SmallShares::kParts, loss_of);
      EXPECT_EQ(training.gradient().scalar_type(), torch::kBFloat16);
      EXPECT_EQ(training.gradient().item<float>(), 1.0F + 4.0F / 128);  // nearest to 1 + 15/512
      training.mixed.zero_grad(training.optimizer);
    }
  }
}

// In fp16, whose largest number is 65504, the sum overflows, and no micro-batch does.
TEST(Accumulate, AnOverflowOfA16BitSumSkipsTheStep) {
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  MixedPrecision mixed =
      initialize(net, optimizer, Options("O3").dtype(torch::kHalf).loss_scale(2.0).verbosity(0));
  const at::Tensor before = net->weight.detach().clone();
  amp::accumulate(mixed, optimizer, 5, [&](std::int64_t) {
    return mixed.forward(net, torch::full({1, 1}, 20'000.0)).to(torch::kFloat).sum() * 5;
  });
  EXPECT_EQ(mixed.step(optimizer), Step::skipped);
  EXPECT_TRUE(same_bits(net->weight, before));
}

TEST(Accumulate, KeepsA16BitGradientInItsPlaceInALargerTensor) {
  SmallShares training("O3", false);
  const at::Tensor all = torch::zeros({2, 1}, torch::kBFloat16);
  training.net->weight.mutable_grad() = all.slice(0, 1, 2);
  amp::accumulate(training.mixed, training.optimizer, SmallShares::kParts,
                  [&](std::int64_t i) { return training.loss_of(i); });
  EXPECT_EQ(all[1].item<float>(), 1.0F + 4.0F / 128);
  EXPECT_EQ(all[0].item<float>(), 0.0F);
}

TEST(Accumulate, KeepsTheSumOfEarlierMicroBatchesAfterAnException) {
  SmallShares training("O3", false);
  EXPECT_THROW(amp::accumulate(training.mixed, training.optimizer, SmallShares::kParts,
                               [&](std::int64_t i) {
                                 if (i == 10) throw std::runtime_error("no more data");
                                 return training.loss_of(i);
                               }),
               std::runtime_error);
  EXPECT_EQ(training.gradient().item<float>(), 1.0F + 2.0F / 128);  // nearest to 1 + 9/512
}

TEST(Accumulate, AddsToGradientsThatExist) {
  Training once("O2");
  once.accumulate(2);
  Training twice("O2");
  twice.accumulate(2);
  twice.accumulate(2);
  std::vector<at::Tensor> doubled;
  for (const at::Tensor& one : once.gradients()) doubled.push_back(one * 2);
  EXPECT_TRUE(test::near(twice.gradients(), doubled, test::reduction_tolerance(torch::kFloat, 4)));
}

TEST(Accumulate, AnOverflowInAnyMicroBatchSkipsTheStepOnce) {
  for (const std::int64_t bad : {0, 1, 3}) {
    Training parted("O2", torch::kHalf);
    const double scale = parted.mixed.loss_scaler().scale();
    const auto before = copies(parted.net->parameters());
    amp::accumulate(parted.mixed, parted.optimizer, 4, [&](std::int64_t i) {
      const at::Tensor loss = parted.loss_of(i, 4);
      return i == bad ? loss * HUGE_VAL : loss;
    });
    EXPECT_EQ(parted.mixed.step(parted.optimizer), Step::skipped) << bad;
    EXPECT_EQ(parted.mixed.loss_scaler().scale(), scale / 2);
    EXPECT_TRUE(same_bits(copies(parted.net->parameters()), before));
    parted.accumulate(4);
    EXPECT_EQ(parted.mixed.step(parted.optimizer), Step::stepped);
  }
}

TEST(Accumulate, OnlyTheLastMicroBatchCommunicates) {
  for (const std::int64_t parts : {1, 2, 4}) {
    Training training("O1");
    Recorder wrapper;
    std::vector<bool> forward;
    std::vector<bool> backward;
    amp::accumulate(training.mixed, training.optimizer, wrapper, parts, [&](std::int64_t i) {
      forward.push_back(wrapper.silent);
      at::Tensor loss = training.loss_of(i, parts);
      loss.register_hook([&](const at::Tensor&) { backward.push_back(wrapper.silent); });
      return loss;
    });
    std::vector<bool> want(static_cast<std::size_t>(parts), true);
    want.back() = false;
    EXPECT_EQ(forward, want);
    EXPECT_EQ(backward, want);
    EXPECT_FALSE(wrapper.silent);
  }
}

TEST(Accumulate, RefusesNoMicroBatchesAndPassesExceptionsOn) {
  Training training("O2");
  bool called = false;
  for (const std::int64_t parts : {0, -1}) {
    expect_error(
        [&] {
          amp::accumulate(training.mixed, training.optimizer, parts, [&](std::int64_t) {
            called = true;
            return at::Tensor();
          });
        },
        {"[amp.accumulate]", "at least 1", std::to_string(parts)});
  }
  EXPECT_FALSE(called);
  Recorder wrapper;
  EXPECT_THROW(amp::accumulate(training.mixed, training.optimizer, wrapper, 4,
                               [&](std::int64_t i) {
                                 if (i == 2) throw std::runtime_error("no more data");
                                 return training.loss_of(i, 4);
                               }),
               std::runtime_error);
  EXPECT_FALSE(wrapper.silent);
  training.mixed.zero_grad(training.optimizer);
  training.accumulate(4);
  Training undisturbed("O2");
  undisturbed.accumulate(4);
  EXPECT_TRUE(same_bits(training.gradients(), undisturbed.gradients()));
}

TEST(Accumulate, KeepsFp64LossesInFp64) {
  Training training("O0");
  const at::Tensor mean =
      amp::accumulate(training.mixed, training.optimizer, 3,
                      [&](std::int64_t i) { return training.loss_of(i, 4).to(torch::kDouble); });
  EXPECT_EQ(mean.scalar_type(), torch::kDouble);
}

}  // namespace
}  // namespace semitone::amp::accumulate_test
