// Which kernels compute the operators of a region, as listeners hear it (events::OperatorReplaced).

#include "semitone/autocast/autocast.h"
#include "semitone/autocast/cast_policy.h"
#include "tests/autocast/emulation_fixture.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp::emulation_test {
namespace {

using test::RecordedEvents;

// Names of operators and of the kernels that replaced LibTorch's.
using Replaced = std::vector<std::pair<std::string, std::string>>;

Replaced replaced_in(const CastPolicy& policy, const std::function<void()>& code) {
  const RecordedEvents events;
  const Autocast region(policy);
  code();
  return events.operators();
}

TEST(OperatorEvents, NameEmulatedProducts) {
  const at::Tensor x = torch::ones({3, 4});
  const at::Tensor image = torch::ones({1, 2, 5, 5});
  const auto code = [&] {
    at::mm(x, x.t());
    at::linear(x, x);
    at::conv2d(image, torch::ones({3, 2, 3, 3}));
    at::relu(x);
  };
  const Replaced want{{"mm", "emulated"}, {"linear", "emulated"}, {"conv2d", "emulated"}};
  for (const auto dtype : {kFp16, kBf16}) {
    EXPECT_EQ(replaced_in(semitone(dtype).fast_kernels(false), code), want);
    EXPECT_EQ(replaced_in(semitone(dtype, Emulation::never).fast_kernels(false), code), Replaced());
  }
}

TEST(OperatorEvents, NameEmulatedProductsOf16BitModels) {
  const at::Tensor x = torch::ones({3, 3}, kBf16);
  const auto code = [&] { at::mm(x, x); };
  EXPECT_EQ(replaced_in(none(kBf16), code), (Replaced{{"mm", "emulated"}}));
}

TEST(OperatorEvents, NameFastKernelsThatRan) {
  const at::Tensor x = torch::ones({64, 1024}, kBf16);
  const at::Tensor small = torch::ones({4, 4}, kBf16);
  const auto code = [&] {
    at::layer_norm(x, {1024});
    at::add(x, x);
    at::dropout(x, 0.5, /*train=*/false);
    at::relu(small);  // too small to be worth a kernel
  };
  const Replaced want{{"layer_norm", "semitone"}, {"add.Tensor", "semitone"}};
  EXPECT_EQ(replaced_in(semitone(kBf16), code), want);
  EXPECT_EQ(replaced_in(semitone(kBf16).fast_kernels(false), code), Replaced());
}

TEST(OperatorEvents, NameFastKernelsThatWidenTheirArguments) {
  const at::Tensor logits = torch::ones({6, 11}, kBf16);
  const at::Tensor target = torch::zeros({6}, torch::kLong);
  const auto code = [&] { at::cross_entropy_loss(logits, target); };
  EXPECT_EQ(replaced_in(semitone(kBf16), code), (Replaced{{"cross_entropy_loss", "semitone"}}));
}

TEST(OperatorEvents, OutsideOfRegionsThereAreNone) {
  const RecordedEvents events;
  const at::Tensor x = torch::ones({64, 1024}, kBf16);
  at::layer_norm(x, {1024});
  at::mm(x, x.t());
  EXPECT_TRUE(events.operators().empty());
}

TEST(OperatorEvents, ListenersChangeNoResult) {
  torch::manual_seed(4);
  const at::Tensor x = torch::randn({64, 1024});
  const auto result = [&] {
    const Autocast region(semitone(kBf16));
    return at::layer_norm(at::mm(x, x.t()), {64});
  };
  const at::Tensor unheard = result();
  const RecordedEvents events;
  EXPECT_TRUE(test::same_bits(result(), unheard));
  EXPECT_EQ(events.operators().size(), 2);
}

}  // namespace
}  // namespace semitone::amp::emulation_test
