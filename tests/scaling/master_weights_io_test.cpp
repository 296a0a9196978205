// Masters: saving and loading.

#include "semitone/core/error.h"
#include "semitone/scaling/master_weights.h"
#include "tests/scaling/master_weights_fixture.h"
#include "tests/support/archive.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp::master_weights_test {
namespace {

using test::archived;
using test::message_of;
using test::same_bits;
using test::saved;
using testing::HasSubstr;

TEST(MasterWeights, SaveAndLoadAreExact) {
  Pair source;
  source.masters.set(source.weight, torch::randn({4}));
  auto archive = saved(source.masters);
  Pair target;
  target.masters.load(archive);
  EXPECT_TRUE(same_bits(target.master, source.master));
  EXPECT_TRUE(same_bits(target.weight, source.weight));
  target.masters.sync();
  EXPECT_TRUE(same_bits(target.master, source.master));
}

// A head for another task: the program that goes on has the new one from its start.
TEST(MasterWeights, AreSavedForWhatTheOptimizerHas) {
  torch::optim::SGD optimizer({parameter({3})}, 0.1);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({parameter({2})}));
  MasterWeights masters(optimizer);
  const auto head = parameter({5});
  optimizer.param_groups()[1].params() = {head};
  masters.sync();
  masters.set(head, torch::randn({5}));
  auto archive = saved(masters);

  const auto fresh_head = parameter({5});
  torch::optim::SGD fresh({parameter({3})}, 0.1);
  fresh.add_param_group(torch::optim::OptimizerParamGroup({fresh_head}));
  MasterWeights loaded(fresh);
  loaded.load(archive);
  EXPECT_TRUE(same_bits(loaded.master_of(fresh_head), masters.master_of(head)));
}

TEST(MasterWeights, AreSavedForAGroupThatWasFilledAnew) {
  for (const bool synced : {false, true}) {
    const auto frozen = parameter({2});
    const auto head = parameter({3});
    torch::optim::SGD optimizer({frozen, head}, 0.1);
    MasterWeights masters(optimizer);
    masters.set(frozen, torch::randn({2}));
    frozen.requires_grad_(false);
    optimizer.param_groups()[0].params() = {frozen, head};
    if (synced) masters.sync();
    auto archive = saved(masters);
    const at::Tensor before = masters.master_of(frozen).detach().clone();
    masters.set(frozen, torch::zeros({2}));
    masters.load(archive);
    EXPECT_TRUE(same_bits(masters.master_of(frozen).detach(), before));
    EXPECT_TRUE(masters.is_master(in_group(optimizer, 0, 0)));
  }
}

TEST(MasterWeights, AreSavedByPlaceNotByTheOrderInWhichTheyCame) {
  const auto frozen_first = parameter({3}).requires_grad_(false);
  const auto last = parameter({3});
  torch::optim::SGD optimizer({frozen_first, last}, 0.1);
  MasterWeights masters(optimizer);
  frozen_first.requires_grad_(true);
  auto late = parameter({3});
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({late}));
  masters.sync();
  auto archive = saved(masters);

  torch::optim::SGD fresh({parameter({3}), parameter({3})}, 0.1);
  fresh.add_param_group(torch::optim::OptimizerParamGroup({parameter({3})}));
  MasterWeights loaded(fresh);
  loaded.load(archive);
  for (const auto& [group, index] : {std::pair(0U, 0U), std::pair(0U, 1U), std::pair(1U, 0U)}) {
    EXPECT_TRUE(same_bits(in_group(fresh, group, index), in_group(optimizer, group, index)));
  }
}

TEST(MasterWeights, MisfitsAreErrorsThatChangeNothing) {
  const std::vector<std::function<void(torch::serialize::OutputArchive&)>> misfits{
      [](auto&) {},
      [](auto& archive) { archive.write("size", c10::IValue(1)); },
      [](auto& archive) { archive.write("size", c10::IValue(std::string("two"))); },
      [](auto& archive) {
        torch::optim::SGD optimizer({parameter({4})}, 0.1);
        MasterWeights(optimizer).save(archive);
      },
      [](auto& archive) {
        torch::optim::SGD optimizer({parameter({4}), parameter({5})}, 0.1);
        MasterWeights(optimizer).save(archive);
      },
      [](auto& archive) {
        torch::optim::SGD optimizer({parameter({4})}, 0.1);
        optimizer.add_param_group(torch::optim::OptimizerParamGroup({parameter({3})}));
        MasterWeights(optimizer).save(archive);
      },
      [](auto& archive) {
        archive.write("size", c10::IValue(2));
        archive.write("group0_0", torch::zeros({4}));
        archive.write("group0_1", c10::IValue(3.0));
      },
  };
  for (std::size_t i = 0; i < misfits.size(); ++i) {
    const auto first = parameter({4});
    const auto second = parameter({3});
    torch::optim::SGD optimizer({first, second}, 0.1);
    MasterWeights masters(optimizer);
    const auto before = masters.master_of(first).clone();
    auto archive = archived(misfits[i]);
    EXPECT_THAT(message_of<FileError>([&] { masters.load(archive); }),
                HasSubstr("[amp.master_weights.load]"))
        << i;
    EXPECT_TRUE(same_bits(masters.master_of(first), before)) << i;
    EXPECT_TRUE(same_bits(first, rounded(before, first))) << i;
  }
}

TEST(MasterWeights, MisfitsSayWhatIsWrong) {
  torch::optim::SGD small({parameter({4})}, 0.1);
  torch::optim::SGD large({parameter({4}), parameter({3})}, 0.1);
  torch::optim::SGD other({parameter({4}), parameter({9})}, 0.1);
  MasterWeights masters(large);
  auto fewer = saved(MasterWeights(small));
  EXPECT_THAT(message_of<FileError>([&] { masters.load(fewer); }),
              HasSubstr("expected 2 master weights, got 1"));
  auto misshapen = saved(MasterWeights(other));
  EXPECT_THAT(message_of<FileError>([&] { masters.load(misshapen); }),
              HasSubstr("expected a master weight of shape [3], got [9]"));
}

}  // namespace
}  // namespace semitone::amp::master_weights_test
