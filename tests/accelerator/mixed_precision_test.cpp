#include "semitone/amp/tune.h"
#include "semitone/autocast/autocast.h"
#include "tests/accelerator/training.h"
#include "tests/optim/all_fused_optimizers.h"
#include "tests/support/levels.h"
#include "tests/support/optimizers.h"
#include "tests/support/tolerance.h"

#include <torch/optim.h>

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// amp::initialize and its steps for a model on a device that is not the CPU.
namespace semitone::test::accelerator {
namespace {

struct AcceleratorMixedPrecision : AcceleratorTest {
  // Trains on the CPU and on the device, which is returned, and compares the results.
  static Trained compare(Training training, double tolerance) {
    const Trained want = train(training);
    training.device = device();
    Trained got = train(training);
    expect_same_training(got, want, tolerance);
    return got;
  }

  // Five roundings in each of the layers' outputs and gradients; steps add up.
  static double tolerance_of(const std::string& level, c10::ScalarType dtype) {
    return level == "O0" ? reduction_tolerance(at::kFloat, 64) : rounding_tolerance(dtype, 20);
  }

  static MakeOptimizer sgd() {
    return [](std::vector<at::Tensor> parameters) {
      return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                                 torch::optim::SGDOptions(0.05).momentum(0.9));
    };
  }
};

TEST_F(AcceleratorMixedPrecision, EveryLevelTrainsAsOnTheCPU) {
  for (const std::string level : kLevels) {
    for (const auto dtype : kDtypes) {
      SCOPED_TRACE(level + " " + c10::toString(dtype));
      compare({.options = amp::Options(level).dtype(dtype).loss_scale(128.0),
               .make = sgd(),
               .is_exact = level != "O3"},
              tolerance_of(level, dtype));
    }
  }
}

TEST_F(AcceleratorMixedPrecision, StepsReadTheDeviceOnce) {
  for (const std::string level : {"O1", "O2"}) {
    const auto options = amp::Options(level).dtype(at::kHalf).loss_scale("dynamic");
    const Trained trained = train({.device = device(), .options = options, .make = sgd()});
    EXPECT_EQ(trained.forward_and_backward.reads, 0) << level;
    EXPECT_EQ(trained.forward_and_backward.waits, 0) << level;
    EXPECT_EQ(trained.step.reads, std::ssize(trained.steps)) << level;
    EXPECT_EQ(trained.step.waits, 0) << level;
  }
}

TEST_F(AcceleratorMixedPrecision, OverflowsAreSkipped) {
  for (const std::string level : {"O1", "O2", "O3"}) {
    const auto options = amp::Options(level).dtype(at::kHalf).loss_scale("dynamic");
    const Trained trained =
        compare({.options = options, .make = sgd(), .overflow_at = 1, .is_exact = level != "O3"},
                tolerance_of(level, at::kHalf));
    EXPECT_EQ(trained.steps[1], amp::Step::skipped) << level;
    EXPECT_EQ(trained.steps[2], amp::Step::stepped) << level;
  }
}

TEST_F(AcceleratorMixedPrecision, ClippedStepsAreTheCPUs) {
  for (const std::string level : {"O1", "O2"}) {
    const auto options = amp::Options(level).dtype(at::kHalf).loss_scale(128.0);
    compare({.options = options, .make = sgd(), .max_norm = 0.1}, tolerance_of(level, at::kHalf));
  }
}

TEST_F(AcceleratorMixedPrecision, EveryFusedOptimizerTrainsAsOnTheCPU) {
  for (const Kind& kind : all_fused_optimizers()) {
    for (const std::string level : {"O0", "O1", "O2"}) {
      SCOPED_TRACE(kind.name + " " + level);
      const auto options = amp::Options(level).dtype(at::kHalf).loss_scale(128.0);
      const auto make = [&](std::vector<at::Tensor> parameters) { return kind(parameters); };
      compare({.options = options, .make = make, .is_exact = level == "O0"},
              tolerance_of(level, at::kHalf));
    }
  }
}

// On the CPU, gradients with a scale of 1 stay in the model until the step.
TEST_F(AcceleratorMixedPrecision, FusedOptimizersTrainWithoutAScale) {
  for (const Kind& kind : all_fused_optimizers()) {
    for (const double max_norm : {0.0, 0.1}) {
      SCOPED_TRACE(kind.name);
      const auto options = amp::Options("O2").dtype(at::kBFloat16).loss_scale(1.0);
      const auto make = [&](std::vector<at::Tensor> parameters) { return kind(parameters); };
      const Trained got =
          compare({.options = options, .make = make, .max_norm = max_norm, .is_exact = false},
                  tolerance_of("O2", at::kBFloat16));
      EXPECT_EQ(got.forward_and_backward.reads, 0);
    }
  }
}

TEST_F(AcceleratorMixedPrecision, LibTorchsOptimizersTrainAsOnTheCPU) {
  for (const OptimizerKind& kind : all_optimizers()) {
    SCOPED_TRACE(kind.name);
    const auto options = amp::Options("O2").dtype(at::kHalf).loss_scale(128.0);
    compare({.options = options, .make = kind.make, .is_exact = false},
            tolerance_of("O2", at::kHalf));
  }
}

// Flattens the results of a convolution with view(), which LibTorch refuses in channels last.
struct ImageNetImpl : torch::nn::Module {
  ImageNetImpl() {
    register_module("conv", conv);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& images) {
    const at::Tensor x = conv(images);
    is_channels_last = x.stride(1) == 1;
    return head(x.view({x.size(0), -1}));
  }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 4, 3)};
  torch::nn::Linear head{64, 3};
  bool is_channels_last = false;
};
TORCH_MODULE(ImageNet);

TEST_F(AcceleratorMixedPrecision, ChannelsLastModelsMayUseView) {
  const auto images = torch::randn({5, 2, 6, 6});
  for (const std::string level : {"O1", "O2", "O3"}) {
    const auto options = amp::Options(level).dtype(at::kHalf).verbosity(0);
    torch::manual_seed(1);
    ImageNet host;
    const at::Tensor want = amp::initialize(host, options).forward(host, images);
    torch::manual_seed(1);
    ImageNet net;
    move(*net, device());
    auto mixed =
        amp::initialize(net, amp::Options(options).memory_format(at::MemoryFormat::ChannelsLast));
    const at::Tensor got = mixed.forward(net, images.to(device()));
    EXPECT_TRUE(net->is_channels_last) << level;
    EXPECT_TRUE(near(got.cpu(), want, tolerance_of(level, at::kHalf))) << level;
    got.sum().backward();
    EXPECT_EQ(net->conv->weight.grad().sizes(), net->conv->weight.sizes()) << level;
  }
}

// The first training moves the model, as the program's own does.
TEST_F(AcceleratorMixedPrecision, TuneFollowsTheModelToItsDevice) {
  torch::nn::Linear net(8, 8);
  const auto loss = [&](const std::optional<amp::CastPolicy>& policy) {
    if (net->weight.device() != device()) move(*net, device());
    const at::Tensor x = torch::ones({2, 8}).to(device());
    if (!policy.has_value()) return 1.0;
    const amp::Autocast region(*policy);
    const bool in_fp32 = net(x).scalar_type() == at::kFloat;
    return in_fp32 ? 1.0 : 2.0;
  };
  const auto result = amp::tune(net, amp::CastPolicy::semitone(at::kHalf), loss);
  EXPECT_EQ(result.policy.device(), kType);
  EXPECT_EQ(result.operators, std::vector<std::string>{"addmm"}) << result.to_string();
}

}  // namespace
}  // namespace semitone::test::accelerator
