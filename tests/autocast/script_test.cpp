// TorchScript in a region: its operators follow the policy as eager ones do.

#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/core/dtype.h"
#include "tests/support/casts.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace semitone::amp::script_test {
namespace {

using test::CastRecording;
using test::expect_bitwise_equal;
using test::expect_close;

constexpr auto kCpu = torch::kCPU;
constexpr auto kFp32 = torch::kFloat;
constexpr auto kFp16 = torch::kHalf;
constexpr auto kBf16 = torch::kBFloat16;

// Sizes of no other tensor here, so that casts of weights are recognised by their size.
constexpr std::int64_t kIn = 6;
constexpr std::int64_t kHidden = 7;
constexpr std::int64_t kOut = 3;
// TorchScript records types in the first runs, and recompiles for them.
constexpr int kRuns = 4;

// ---- functions ---------------------------------------------------------------------------------

constexpr const char* kFunctions = R"(
def product(a, b):
    return torch.mm(a, b)

def softmax(a, b):
    return torch.softmax(a, 1)

def stack(a, b):
    return torch.stack([a, b])

def loss(a, b):
    return torch.mse_loss(a, b)

def relu(a, b):
    return torch.relu(a)

def arithmetic(a, b):
    return torch.exp(a) * b + a

def in_place(a, b):
    c = torch.zeros_like(a)
    c.addmm_(a, b)
    return c

def nested(a, b):
    return softmax(product(a, b), b)

def branches(a, b):
    if int(a.size(0)) > 2:
        for i in range(3):
            a = product(a, b)
    return a
)";

struct FunctionCase {
  const char* name;
  at::Tensor (*eager)(const at::Tensor& a, const at::Tensor& b);
};

const std::vector<FunctionCase>& function_cases() {
  static const std::vector<FunctionCase> cases{
      {"product", [](const at::Tensor& a, const at::Tensor& b) { return at::mm(a, b); }},
      {"softmax", [](const at::Tensor& a, const at::Tensor&) { return at::softmax(a, 1); }},
      {"stack", [](const at::Tensor& a, const at::Tensor& b) { return at::stack({a, b}); }},
      {"loss", [](const at::Tensor& a, const at::Tensor& b) { return at::mse_loss(a, b); }},
      {"relu", [](const at::Tensor& a, const at::Tensor&) { return at::relu(a); }},
      {"arithmetic", [](const at::Tensor& a, const at::Tensor& b) { return at::exp(a) * b + a; }},
      {"in_place",
       [](const at::Tensor& a, const at::Tensor& b) { return at::zeros_like(a).addmm_(a, b); }},
      {"nested",
       [](const at::Tensor& a, const at::Tensor& b) { return at::softmax(at::mm(a, b), 1); }},
      {"branches", [](const at::Tensor& a, const at::Tensor& b) {
         return at::mm(at::mm(at::mm(a, b), b), b);
       }}};
  return cases;
}

class ScriptFunctions : public testing::TestWithParam<std::tuple<std::size_t, const char*>> {
 protected:
  ScriptFunctions() { torch::manual_seed(21); }

  // In a region the function equals the eager one, after enough runs for a compilation for its
  // types.
  void expect_eager(torch::jit::CompilationUnit& unit, const CastPolicy& policy,
                    c10::ScalarType input) const {
    SCOPED_TRACE(dtype_name(policy.dtype()) + " region, " + dtype_name(input) + " input");
    const at::Tensor a = (torch::rand({4, 4}) + 0.5).to(input);
    const at::Tensor b = (torch::rand({4, 4}) + 0.5).to(input);
    const Autocast region(policy);
    const at::Tensor want = one.eager(a, b);
    for (int run = 0; run < kRuns; ++run) {
      SCOPED_TRACE(run);
      const auto leaf = a.clone().requires_grad_();
      const auto eager_leaf = a.clone().requires_grad_();
      const at::Tensor got = unit.run_method(one.name, leaf, b).toTensor();
      expect_bitwise_equal(got.detach(), want);
      got.to(kFp32).sum().backward();
      one.eager(eager_leaf, b).to(kFp32).sum().backward();
      expect_bitwise_equal(leaf.grad(), eager_leaf.grad());
    }
  }

  const FunctionCase& one = function_cases()[std::get<0>(GetParam())];
  std::string preset = std::get<1>(GetParam());
};

TEST_P(ScriptFunctions, RunInTheDtypesOfThePolicyAndHaveTheGradientsOfEagerOnes) {
  const auto unit = torch::jit::compile(kFunctions);
  for (const auto dtype : {kBf16, kFp16}) {
    const auto policy = CastPolicy::by_name(preset, {kCpu, dtype});
    for (const auto input : {kFp32, dtype}) expect_eager(*unit, policy, input);
  }
}

// Code that was compiled in one region must not decide in another one, or outside.
TEST_P(ScriptFunctions, CompiledInOneRegionAreRightInTheNext) {
  const auto unit = torch::jit::compile(kFunctions);
  const auto a = torch::rand({4, 4});
  for (int round = 0; round < 2; ++round) {
    for (int run = 0; run < kRuns; ++run)
      expect_bitwise_equal(unit->run_method(one.name, a, a).toTensor(), one.eager(a, a));
    expect_eager(*unit, CastPolicy::by_name(preset, {kCpu, kBf16}), kFp32);
    expect_eager(*unit, CastPolicy::semitone({kCpu, kFp16}).keep_fp32("mm").lower("relu"), kFp32);
  }
}

// Outside of regions the JIT itself differentiates its compiled code.
TEST_P(ScriptFunctions, CompiledWithGradientsOutsideAreRightInside) {
  const auto unit = torch::jit::compile(kFunctions);
  for (int run = 0; run < kRuns; ++run) {
    const auto a = torch::rand({4, 4}).requires_grad_();
    unit->run_method(one.name, a, a).toTensor().sum().backward();
  }
  expect_eager(*unit, CastPolicy::by_name(preset, {kCpu, kBf16}), kFp32);
}

INSTANTIATE_TEST_SUITE_P(Script, ScriptFunctions,
                         testing::Combine(testing::Range(std::size_t{0}, function_cases().size()),
                                          testing::Values("semitone", "torch", "apex")),
                         [](const auto& tested) {
                           return std::string(function_cases()[std::get<0>(tested.param)].name) +
                                  "_" + std::get<1>(tested.param);
                         });

TEST(ScriptCasts, DtypesAreThoseOfTheTable) {
  const auto unit = torch::jit::compile(kFunctions);
  const auto x = torch::rand({4, 4});
  const auto dtype_of = [&](const char* name, const at::Tensor& a) {
    return unit->run_method(name, a, x).toTensor().scalar_type();
  };
  const Autocast region(CastPolicy::semitone({kCpu, kBf16}));
  for (int run = 0; run < kRuns; ++run) {
    EXPECT_EQ(dtype_of("product", x), kBf16);
    EXPECT_EQ(dtype_of("softmax", x.to(kBf16)), kFp32);
    EXPECT_EQ(dtype_of("loss", x.to(kBf16)), kFp32);
    EXPECT_EQ(dtype_of("stack", x.to(kBf16)), kFp32);
    EXPECT_EQ(dtype_of("relu", x.to(kBf16)), kBf16);
    EXPECT_EQ(dtype_of("nested", x), kFp32);
    EXPECT_EQ(dtype_of("branches", x), kBf16);
    const DisableCasts disabled;
    EXPECT_EQ(dtype_of("product", x), kFp32);
  }
}

// ---- modules -----------------------------------------------------------------------------------

// A module of two layers, the first of which is a module of its own.
torch::jit::Module make_net() {
  torch::manual_seed(22);
  const auto trained = [](at::IntArrayRef shape) {
    return (torch::randn(shape) / 2).requires_grad_();
  };
  torch::jit::Module body("Body");
  body.register_parameter("weight", trained({kIn, kHidden}), false);
  body.register_parameter("bias", trained({kHidden}), false);
  body.define(R"(
    def forward(self, x):
        return torch.relu(torch.addmm(self.bias, x, self.weight))
  )");
  torch::jit::Module net("Net");
  net.register_module("body", body);
  net.register_parameter("head", trained({kHidden, kOut}), false);
  net.define(R"(
    def scores(self, x):
        return torch.mm(self.body.forward(x), self.head)

    def forward(self, x):
        return self.scores(x)

    def twice(self, x):
        return self.scores(x) + self.scores(x)
  )");
  return net;
}

std::vector<at::Tensor> parameters_of(const torch::jit::Module& net) {
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : net.parameters()) parameters.push_back(parameter);
  return parameters;
}

at::Tensor eager(const torch::jit::Module& net, const at::Tensor& x) {
  const auto body = net.attr("body").toModule();
  const auto hidden =
      at::relu(at::addmm(body.attr("bias").toTensor(), x, body.attr("weight").toTensor()));
  return at::mm(hidden, net.attr("head").toTensor());
}

TEST(ScriptModules, RunAsThePolicySaysThroughNestedCalls) {
  auto net = make_net();
  const auto x = torch::rand({4, kIn});
  for (const auto dtype : {kBf16, kFp16}) {
    const Autocast region(CastPolicy::semitone({kCpu, dtype}));
    for (int run = 0; run < kRuns; ++run) {
      const auto got = net.forward({x}).toTensor();
      EXPECT_EQ(got.scalar_type(), dtype);
      expect_bitwise_equal(got, eager(net, x));
    }
  }
  EXPECT_EQ(net.forward({x}).toTensor().scalar_type(), kFp32);
}

TEST(ScriptModules, CastTheirWeightsOnce) {
  auto net = make_net();
  const auto x = torch::rand({4, kIn});
  for (int run = 0; run < kRuns; ++run) {
    const CastRecording casts;
    const Autocast region(CastPolicy::semitone({kCpu, kBf16}));
    (void)net.get_method("twice")({x});
    EXPECT_EQ(casts->computed(kIn * kHidden), 1U);
    EXPECT_EQ(casts->cached(kIn * kHidden), 1U);
    EXPECT_EQ(casts->computed(kHidden * kOut), 1U);
    EXPECT_EQ(casts->cached(kHidden * kOut), 1U);
  }
}

TEST(ScriptModules, GiveFp32GradientsToTheirParameters) {
  auto net = make_net();
  const auto x = torch::rand({4, kIn});
  const auto gradients = [&](auto&& forward) {
    std::vector<at::Tensor> found;
    for (auto& parameter : parameters_of(net)) parameter.mutable_grad().reset();
    {
      const Autocast region(CastPolicy::semitone({kCpu, kBf16}));
      forward().to(kFp32).pow(2).sum().backward();
    }
    for (const auto& parameter : parameters_of(net)) found.push_back(parameter.grad());
    return found;
  };
  const auto want = gradients([&] { return eager(net, x); });
  for (int run = 0; run < kRuns; ++run) {
    const auto got = gradients([&] { return net.forward({x}).toTensor(); });
    ASSERT_EQ(got.size(), 3U);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].scalar_type(), kFp32);
      expect_bitwise_equal(got[i], want[i]);
    }
  }
}

TEST(ScriptModules, KeepParametersInFp32ByName) {
  auto net = make_net();
  const auto policy = CastPolicy::semitone({kCpu, kBf16}).keep_fp32_params("head").bind(net);
  const auto x = torch::rand({4, kIn});
  const Autocast region(policy);
  for (int run = 0; run < kRuns; ++run) {
    EXPECT_EQ(net.forward({x}).toTensor().scalar_type(), kFp32);
    const auto body = net.attr("body").toModule();
    EXPECT_EQ(body.get_method("forward")({x}).toTensor().scalar_type(), kBf16);
  }
}

// ---- amp::initialize ---------------------------------------------------------------------------

class ScriptLevels : public testing::TestWithParam<c10::ScalarType> {};

TEST_P(ScriptLevels, O1TrainsAScriptModule) {
  auto net = make_net();
  torch::optim::SGD optimizer(parameters_of(net), 0.2);
  auto mixed = initialize(net, optimizer,
                          Options(OptLevel::O1).device(kCpu).dtype(GetParam()).loss_scale(128.0));
  const auto x = torch::rand({32, kIn});
  const auto target = at::cat({x.sum(1, true), x.slice(1, 0, 2)}, 1).tanh();
  double first = 0;
  double last = 0;
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    const CastRecording casts;
    const at::Tensor output = mixed.forward(net, x).toTensor();
    EXPECT_EQ(output.scalar_type(), kFp32) << "forward's results are fp32";
    EXPECT_EQ(casts->computed(kIn * kHidden), 1U);
    EXPECT_EQ(casts->computed(kHidden * kOut), 1U);
    for (const auto& cast : casts->heard()) {
      if (cast.from == kFp32) {
        EXPECT_EQ(cast.to, GetParam()) << cast.op;
      }
    }
    const at::Tensor loss = at::mse_loss(output, target);
    mixed.scale_loss(loss, optimizer).backward();
    for (const auto& parameter : parameters_of(net)) {
      EXPECT_EQ(parameter.scalar_type(), kFp32);
      EXPECT_EQ(parameter.grad().scalar_type(), kFp32);
    }
    EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  EXPECT_LT(last, 0.5 * first);
  // Outside of regions TorchScript takes addmm apart, which rounds once more on processors where
  // the product adds the bias in one operation.
  expect_close(net.forward({x}).toTensor(), eager(net, x),
               test::reduction_tolerance(kFp32, kIn + kHidden));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ScriptLevels, testing::Values(kBf16, kFp16),
                         [](const auto& tested) { return dtype_name(tested.param); });

// LibTorch's own idiom: std::vector<torch::jit::IValue> inputs, and keyword arguments.
TEST(ScriptModules, TakeAllInputsInOneVector) {
  torch::jit::Module module("Net");
  module.register_parameter("weight", torch::ones({kOut, kIn}), false);
  module.define(R"(
    def forward(self, x: Tensor, factor: float = 1.0):
        return torch.linear(x, self.weight) * factor
  )");
  const auto x = torch::full({2, kIn}, 0.5);
  for (const char* level : {"O1", "O2"}) {
    auto copy = module.deepcopy();
    auto mixed = initialize(copy, Options(level).dtype(kBf16).verbosity(0));
    const std::vector<torch::jit::IValue> inputs{x};
    const auto one = mixed.forward(copy, inputs).toTensor();
    EXPECT_EQ(one.scalar_type(), kFp32);
    EXPECT_TRUE(at::equal(one, torch::full({2, kOut}, 0.5 * kIn)));
    const torch::jit::Kwargs named{{"factor", 2.0}};
    EXPECT_TRUE(at::equal(mixed.forward(copy, inputs, named).toTensor(), 2 * one));
    EXPECT_TRUE(at::equal(mixed.forward(copy, x, 2.0).toTensor(), 2 * one)) << "one by one";
  }
}

}  // namespace
}  // namespace semitone::amp::script_test
