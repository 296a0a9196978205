// Faults that were planted in trainings, and what their reports name.

#include "semitone/amp/initialize.h"
#include "semitone/report/precision_report.h"
#include "semitone/report/recorder.h"
#include "semitone/zoo/mnist.h"
#include "tests/support/temporary_folder.h"

#include <torch/library.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace semitone::report::planted_faults_test {
namespace {

using semitone::test::TemporaryFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// The verdict of a rule. One that does not apply has no title.
Verdict verdict_of(const std::filesystem::path& directory, const std::string& id) {
  const PrecisionReport report(directory);
  for (const Verdict& verdict : report.verdicts()) {
    if (verdict.id == id) return verdict;
  }
  return {};
}

// Trains for some steps in fp16, with samples of all but two of them: kernels that are made at
// their first use would outweigh the operators of these nets.
template <typename Net>
void train(Net& net, const std::filesystem::path& directory, const amp::Options& options,
           const std::function<at::Tensor(std::int64_t step, amp::MixedPrecision& mixed)>& loss_of,
           std::int64_t steps = 4) {
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  auto mixed = amp::initialize(net, optimizer, options);
  const auto train_step = [&](std::int64_t step) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(step, mixed);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
  };
  for (std::int64_t step = -1; step <= 0; ++step) train_step(step);
  RunLog log(directory, RunLogOptions().config({{"dtype", "float16"}}));
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  for (std::int64_t step = 1; step <= steps; ++step) {
    log.set_step(step);
    train_step(step);
  }
  log.close();
}

amp::Options fp16(double loss_scale) {
  return amp::Options("O1").dtype(torch::kHalf).loss_scale(loss_scale).verbosity(0);
}

struct TwoBranchesImpl : torch::nn::Module {
  TwoBranchesImpl()
      : body(register_module("body", torch::nn::Linear(16, 16))),
        tiny(register_module("tiny", torch::nn::Linear(16, 4))),
        head(register_module("head", torch::nn::Linear(16, 4))) {}
  // The gradients of tiny's result are 2^-26 times those of head's.
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = torch::relu(body(x));
    return head(y) + tiny(y.detach()).to(torch::kFloat) * 0x1p-26;
  }
  torch::nn::Linear body;
  torch::nn::Linear tiny;
  torch::nn::Linear head;
};
TORCH_MODULE(TwoBranches);

// 2^-26 is below half of fp16's least number: with a loss scale of 1 it is lost in the cast.
TEST(PlantedFaults, ALayerWithTinyGradientsIsNamed) {
  for (const double scale : {1.0, 4096.0}) {
    SCOPED_TRACE(scale);
    torch::manual_seed(1);
    const TemporaryFolder folder;
    TwoBranches net;
    train(net, folder.path(), fp16(scale), [&](std::int64_t, amp::MixedPrecision& mixed) {
      return mixed.forward(net, torch::randn({32, 16})).sum();
    });
    const Verdict zeros = verdict_of(folder.path(), "zero_gradients");
    if (scale == 1) {
      EXPECT_EQ(zeros.severity, Severity::warning);
      EXPECT_THAT(zeros.where, testing::UnorderedElementsAre("tiny.weight", "tiny.bias"));
    } else {
      EXPECT_EQ(zeros.title, "");
      EXPECT_NE(verdict_of(folder.path(), "underflow").severity, Severity::problem);
    }
  }
}

// Takes longer than all else in a step, on any machine and beside other programs.
void be_slow() {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

// A fp32 table turns what follows to fp32, as LibTorch promotes.
at::Tensor lookup(const at::Tensor& x, const at::Tensor& table) {
  be_slow();
  return x * 0.5 + table;
}
at::Tensor slow_square(const at::Tensor& x) {
  be_slow();
  return x * x;
}
TORCH_LIBRARY(planted, library) {
  library.def("lookup(Tensor x, Tensor table) -> Tensor", &lookup);
  library.def("slow_square(Tensor x) -> Tensor", &slow_square);
}
at::Tensor call_slow_square(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("planted::slow_square", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

struct OwnOperatorImpl : torch::nn::Module {
  OwnOperatorImpl()
      : body(register_module("body", torch::nn::Linear(32, 64))),
        head(register_module("head", torch::nn::Linear(64, 4))),
        table(register_buffer("table", torch::randn({64}))) {}
  at::Tensor forward(const at::Tensor& x) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("planted::lookup", "")
                               .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
    return head(torch::relu(op.call(body(x), table)));
  }
  torch::nn::Linear body;
  torch::nn::Linear head;
  at::Tensor table;
};
TORCH_MODULE(OwnOperator);

TEST(PlantedFaults, AnOperatorThatBreaksTheDtypeFlowIsNamed) {
  torch::manual_seed(1);
  const TemporaryFolder folder;
  OwnOperator net;
  train(net, folder.path(), fp16(1024), [&](std::int64_t, amp::MixedPrecision& mixed) {
    return mixed.forward(net, torch::randn({64, 32})).square().mean();
  });
  EXPECT_THAT(PrecisionReport(folder.path()).to_text(), HasSubstr("planted::lookup"));
  const Verdict wide = verdict_of(folder.path(), "wide_operator");
  ASSERT_FALSE(wide.where.empty());
  EXPECT_EQ(wide.where.front(), "planted::lookup");
}

struct SlowSquareImpl : torch::nn::Module {
  SlowSquareImpl() : body(register_module("body", torch::nn::Linear(16, 64))) {}
  at::Tensor forward(const at::Tensor& x) { return call_slow_square(body(x)); }
  torch::nn::Linear body;
};
TORCH_MODULE(SlowSquare);

// The policy keeps an operator in fp32, which the report says with its share; with a row it is gone.
TEST(PlantedFaults, AnOperatorInFp32ThatTakesAFifthOfAStepIsNamed) {
  for (const bool lowers : {false, true}) {
    SCOPED_TRACE(lowers);
    torch::manual_seed(1);
    const TemporaryFolder folder;
    SlowSquare net;
    auto policy = amp::CastPolicy::semitone({torch::kCPU, torch::kHalf});
    if (lowers) {
      policy.lower("planted::slow_square");
    } else {
      policy.keep_fp32("planted::slow_square");
    }
    train(net, folder.path(), fp16(1024).policy(policy),
          [&](std::int64_t, amp::MixedPrecision& mixed) {
            return mixed.forward(net, torch::randn({32, 16})).mean();
          });
    const Verdict wide = verdict_of(folder.path(), "wide_operator");
    if (lowers) {
      EXPECT_THAT(wide.where, Not(testing::Contains("planted::slow_square")));
      continue;
    }
    ASSERT_FALSE(wide.where.empty());
    EXPECT_EQ(wide.where.front(), "planted::slow_square");
    EXPECT_GT(wide.figure, 20);
  }
}

struct SmallNetImpl : torch::nn::Module {
  SmallNetImpl()
      : hidden(register_module("hidden", torch::nn::Linear(784, 32))),
        head(register_module("head", torch::nn::Linear(32, 10))) {}
  at::Tensor forward(const at::Tensor& x) { return head(torch::relu(hidden(x.flatten(1)))); }
  torch::nn::Linear hidden;
  torch::nn::Linear head;
};
TORCH_MODULE(SmallNet);

// MNIST in fp16, with its gradients made small by a loss weight, as in a sum of several losses: a
// static scale of 1 loses most of them, a dynamic scale none.
TEST(PlantedFaults, AStaticScaleOfOneUnderflowsWhereADynamicOneDoesNot) {
  const auto set =
      zoo::load_mnist(std::filesystem::path(SEMITONE_SOURCE_DIR) / "data/mnist", zoo::Split::test);
  constexpr double kLossWeight = 0x1p-12;
  const auto underflow = [&](const amp::Options& options) {
    torch::manual_seed(1);
    const TemporaryFolder folder;
    SmallNet net;
    train(
        net, folder.path(), options,
        [&](std::int64_t step, amp::MixedPrecision& mixed) {
          const auto images =
              set.images.narrow(0, 100 * (step + 1), 100).to(torch::kFloat).div(255);
          const auto labels = set.labels.narrow(0, 100 * (step + 1), 100);
          return torch::cross_entropy_loss(mixed.forward(net, images), labels) * kLossWeight;
        },
        /*steps=*/10);
    return verdict_of(folder.path(), "underflow");
  };
  const Verdict fixed = underflow(fp16(1));
  EXPECT_EQ(fixed.severity, Severity::problem);
  EXPECT_GT(fixed.figure, 20);
  EXPECT_THAT(fixed.remedy, HasSubstr("scale"));
  const Verdict dynamic =
      underflow(amp::Options("O1").dtype(torch::kHalf).loss_scale("dynamic").verbosity(0));
  EXPECT_EQ(dynamic.severity, Severity::good);
  EXPECT_LT(dynamic.figure, 1);
}

}  // namespace
}  // namespace semitone::report::planted_faults_test
