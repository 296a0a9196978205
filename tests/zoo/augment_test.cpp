#include "semitone/zoo/augment.h"

#include "semitone/core/error.h"
#include "tests/support/errors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

namespace semitone::zoo {
namespace {

// Images whose pixels all differ, and are not 0.
at::Tensor counted(std::vector<std::int64_t> sizes) {
  return torch::arange(1, c10::multiply_integers(sizes) + 1, torch::kInt).view(sizes);
}

// How an image was moved and mirrored.
struct Change {
  std::int64_t down = 0;
  std::int64_t right = 0;
  bool is_flipped = false;
  auto operator<=>(const Change&) const = default;
};

// The one change of up to `padding` that makes this image of that one, which must exist.
Change change_of(const at::Tensor& from, const at::Tensor& to, std::int64_t padding) {
  const at::Tensor framed = torch::constant_pad_nd(from, {padding, padding, padding, padding});
  std::vector<Change> found;
  for (std::int64_t down = 0; down <= 2 * padding; ++down) {
    for (std::int64_t right = 0; right <= 2 * padding; ++right) {
      const at::Tensor cut = framed.narrow(-2, down, to.size(-2)).narrow(-1, right, to.size(-1));
      if (torch::equal(cut, to)) found.push_back({down, right, false});
      if (torch::equal(cut.flip(-1), to)) found.push_back({down, right, true});
    }
  }
  EXPECT_EQ(found.size(), 1U);
  return found.empty() ? Change{} : found.front();
}

TEST(Augment, ImagesAreMovedWithinAFrameOfZerosAndThenMirrored) {
  constexpr std::int64_t kCount = 400;
  const at::Tensor images = counted({kCount, 2, 6, 9});
  const at::Tensor changed = augment(images, torch::arange(kCount), 0, AugmentOptions().padding(2));
  ASSERT_EQ(changed.sizes(), images.sizes());
  EXPECT_TRUE(changed.is_contiguous());
  std::set<Change> changes;
  std::vector<int> down(5);
  std::vector<int> right(5);
  int flipped = 0;
  for (std::int64_t i = 0; i < kCount; ++i) {
    const Change change = change_of(images[i], changed[i], 2);
    changes.insert(change);
    ++down[static_cast<std::size_t>(change.down)];
    ++right[static_cast<std::size_t>(change.right)];
    flipped += change.is_flipped ? 1 : 0;
  }
  // All 5 x 5 x 2 changes, each part of them about equally often: within five deviations.
  EXPECT_EQ(changes.size(), 50U);
  EXPECT_NEAR(flipped, 200, 50);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(down[i], 80, 40) << i;
    EXPECT_NEAR(right[i], 80, 40) << i;
  }
}

TEST(Augment, AChangeDependsOnSeedEpochAndImageAlone) {
  const at::Tensor images = counted({60, 3, 8, 8}).to(torch::kFloat);
  const at::Tensor all = augment(images, torch::arange(60), 3, AugmentOptions().seed(7));
  const at::Tensor some = torch::tensor({41, 5, 17});
  torch::manual_seed(99);
  EXPECT_TRUE(torch::equal(augment(images.index_select(0, some), some, 3, AugmentOptions().seed(7)),
                           all.index_select(0, some)));
  EXPECT_FALSE(torch::equal(augment(images, torch::arange(60), 4, AugmentOptions().seed(7)), all));
  EXPECT_FALSE(torch::equal(augment(images, torch::arange(60), 3, AugmentOptions().seed(8)), all));
  // Not only the sum of two of them.
  EXPECT_FALSE(torch::equal(augment(images, torch::arange(60), 4, AugmentOptions().seed(6)), all));
  EXPECT_FALSE(
      torch::equal(augment(images, torch::arange(60) + 1, 2, AugmentOptions().seed(7)), all));
}

TEST(Augment, EveryDtypeAndGreyImagesAreChangedAlike) {
  const at::Tensor images = counted({9, 1, 5, 5}).remainder(251);
  const at::Tensor numbers = torch::arange(9);
  const at::Tensor expected = augment(images, numbers, 0);
  for (const auto dtype : {torch::kByte, torch::kFloat, torch::kHalf}) {
    const at::Tensor changed = augment(images.to(dtype), numbers, 0);
    EXPECT_EQ(changed.scalar_type(), dtype);
    EXPECT_TRUE(torch::equal(changed.to(torch::kInt), expected));
  }
  EXPECT_TRUE(torch::equal(augment(images.squeeze(1), numbers, 0), expected.squeeze(1)));
  // In another memory format.
  const at::Tensor colours = counted({9, 3, 5, 5});
  EXPECT_TRUE(torch::equal(augment(colours.contiguous(at::MemoryFormat::ChannelsLast), numbers, 0),
                           augment(colours, numbers, 0)));
  EXPECT_EQ(augment(images.narrow(0, 0, 0), numbers.narrow(0, 0, 0), 0).size(0), 0);
}

TEST(Augment, EachPartCanBeTurnedOff) {
  const at::Tensor images = counted({50, 4, 6});
  const at::Tensor numbers = torch::arange(50);
  const auto with = [&](std::int64_t padding, double probability) {
    return augment(images, numbers, 0,
                   AugmentOptions().padding(padding).flip_probability(probability));
  };
  EXPECT_TRUE(torch::equal(with(0, 0), images));
  EXPECT_TRUE(torch::equal(with(0, 1), images.flip(2)));
  EXPECT_TRUE(torch::equal(with(3, 1), with(3, 0).flip(2)));
  EXPECT_FALSE(torch::equal(with(3, 0), images));
}

// So that a run can be repeated with a later release: splitmix64, computed in Python.
TEST(Augment, TheChangesStayTheSame) {
  const at::Tensor images = counted({6, 7, 7});
  const at::Tensor changed = augment(images, torch::arange(6), 1, AugmentOptions().seed(2));
  std::vector<Change> changes;
  for (std::int64_t i = 0; i < 6; ++i) changes.push_back(change_of(images[i], changed[i], 4));
  EXPECT_EQ(
      changes,
      (std::vector<Change>{
          {3, 3, false}, {5, 1, false}, {6, 3, false}, {0, 2, true}, {1, 1, true}, {5, 5, false}}));
}

TEST(Augment, OtherArgumentsAreRefused) {
  const at::Tensor images = counted({3, 1, 4, 4});
  const at::Tensor numbers = torch::arange(3);
  const auto refuses = [](const auto& call, const char* text) {
    test::expect_error(call, {"[zoo.augment] expected ", text});
  };
  refuses([&] { augment(images[0][0], numbers, 0); },
          "images (B, height, width) or (B, channels, height, width), got int32 of sizes [4, 4]");
  refuses([&] { augment(at::Tensor(), numbers, 0); }, "got none");
  refuses([&] { augment(images, numbers.to(torch::kInt), 0); },
          "an int64 index for each image, got int32 of sizes [3]");
  refuses([&] { augment(images, torch::arange(4), 0); }, "got int64 of sizes [4]");
  refuses([&] { augment(images, torch::arange(3, torch::kMeta), 0); },
          "indices on the device of the images, got meta and cpu");
  refuses([&] { augment(images, numbers, -1); }, "an epoch of 0 or more, got -1");
  refuses([&] { augment(images, numbers, 0, AugmentOptions().padding(-1)); },
          "a padding of 0 or more, got -1");
  refuses([&] { augment(images, numbers, 0, AugmentOptions().flip_probability(1.5)); },
          "a flip_probability from 0 to 1, got 1.5");
}

}  // namespace
}  // namespace semitone::zoo
