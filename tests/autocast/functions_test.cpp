#include "semitone/autocast/functions.h"

#include "semitone/amp/initialize.h"
#include "tests/support/casts.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/library.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

at::Tensor plus(const at::Tensor& a, const at::Tensor& b) {
  return a + b;
}
at::Tensor total(at::TensorList tensors) {
  return at::cat(tensors.vec()).sum();
}
// As in libraries that support autocast: their own kernel on its key.
at::Tensor autocast_own(const at::Tensor& x) {
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("semitone_functions_test::own", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x.to(torch::kFloat));
}

}  // namespace

TORCH_LIBRARY(semitone_functions_test, library) {
  library.def("plus(Tensor a, Tensor b) -> Tensor", plus);
  library.def("total(Tensor[] tensors) -> Tensor", total);
  library.def("own(Tensor x) -> Tensor");
  library.impl("own", c10::DispatchKey::CompositeExplicitAutograd,
               [](const at::Tensor& x) { return x.clone(); });
}
TORCH_LIBRARY_IMPL(semitone_functions_test, AutocastCPU, library) {
  library.impl("own", autocast_own);
}

namespace semitone::amp::functions_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;
using test::expect_error;

constexpr auto kFp32 = torch::kFloat;
constexpr auto kFp16 = torch::kHalf;
constexpr auto kBf16 = torch::kBFloat16;

CastPolicy none(c10::ScalarType dtype = kBf16) {
  return CastPolicy::none({torch::kCPU, dtype});
}

at::Tensor call_plus(const at::Tensor& a, const at::Tensor& b) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("semitone_functions_test::plus", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(a, b);
}
at::Tensor call_total(const std::vector<at::Tensor>& tensors) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("semitone_functions_test::total", "")
                             .typed<at::Tensor(at::TensorList)>();
  return op.call(tensors);
}
at::Tensor call_own(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("semitone_functions_test::own", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

// ---- operators of other libraries --------------------------------------------------------------

TEST(RegisteredOperators, ObeyRowsAsAtensDo) {
  const auto wide = torch::ones({3});
  const auto low = wide.to(kBf16);
  EXPECT_EQ(call_plus(low, wide).scalar_type(), kFp32);
  {
    auto policy = none();
    register_half_function(policy, "semitone_functions_test::plus");
    register_half_function(policy, "semitone_functions_test::total");
    const Autocast region(policy);
    EXPECT_EQ(call_plus(low, wide).scalar_type(), kBf16);
    EXPECT_EQ(call_total({low, wide}).scalar_type(), kBf16);
  }
  {
    auto policy = none();
    register_float_function(policy, "semitone_functions_test::plus");
    const Autocast region(policy);
    EXPECT_EQ(call_plus(low, low).scalar_type(), kFp32);
  }
  {
    auto policy = none();
    register_promote_function(policy, "semitone_functions_test::plus");
    const Autocast region(policy);
    EXPECT_EQ(call_plus(low, low).scalar_type(), kBf16);
    EXPECT_EQ(call_plus(low, low.to(kFp16)).scalar_type(), kFp32);
  }
  {
    const Autocast region(none().ban("semitone_functions_test::plus"));
    expect_error([&] { (void)call_plus(low, low); }, {"'semitone_functions_test::plus'"});
  }
  EXPECT_EQ(call_plus(low, low).scalar_type(), kBf16) << "outside nothing is left of it";
}

TEST(RegisteredOperators, KeepTheirOwnAutocastKernelUnlessARowSaysOtherwise) {
  const auto low = torch::ones({3}, kBf16);
  EXPECT_EQ(call_own(low).scalar_type(), kBf16);
  for (const char* preset : {"semitone", "torch", "apex", "none"}) {
    SCOPED_TRACE(preset);
    const auto policy = CastPolicy::by_name(preset, {torch::kCPU, kBf16});
    {
      const Autocast region(policy);
      EXPECT_EQ(call_own(low).scalar_type(), kFp32);
    }
    {
      const Autocast region(CastPolicy(policy).leave("semitone_functions_test::own"));
      EXPECT_EQ(call_own(low).scalar_type(), kBf16);
    }
    const Autocast region(policy);
    EXPECT_EQ(call_own(low).scalar_type(), kFp32) << "another policy's row must not stay";
  }
}

// ---- callables ---------------------------------------------------------------------------------

std::string dtypes_of(const at::Tensor& a, const at::Tensor& b) {
  return c10::str(a.scalar_type(), " ", b.scalar_type());
}

class Callables : public testing::TestWithParam<c10::ScalarType> {
 protected:
  CastPolicy policy() const { return none(GetParam()); }
  at::Tensor wide = torch::ones({2, 2});
  at::Tensor low = torch::ones({2, 2}, GetParam());
};

TEST_P(Callables, HalfFunctionCastsDownInsideARegionOnly) {
  const auto f = half_function(dtypes_of);
  EXPECT_EQ(f(wide, low), dtypes_of(wide, low));
  const Autocast region(policy());
  EXPECT_EQ(f(wide, low), dtypes_of(low, low));
  const DisableCasts disabled;
  EXPECT_EQ(f(wide, low), dtypes_of(wide, low));
}

// As an operator in a row of lower.
TEST(HalfFunction, RunsInFp32WithAParameterThatThePolicyKeeps) {
  torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  const auto policy =
      CastPolicy::semitone({torch::kCPU, torch::kBFloat16}).keep_fp32_params("1.*").bind(*net);
  const auto dtype_with = [&](const at::Tensor& weight) {
    const Autocast region(policy);
    const auto product =
        half_function([](const at::Tensor& x, const at::Tensor& w) { return x.mm(w.t()); });
    return product(torch::ones({2, weight.size(1)}), weight).scalar_type();
  };
  EXPECT_EQ(dtype_with(net->parameters()[0]), torch::kBFloat16);
  EXPECT_EQ(dtype_with(net->parameters()[2]), torch::kFloat);
}

TEST_P(Callables, FloatFunctionCastsUpInsideARegionOnly) {
  const auto f = float_function(dtypes_of);
  EXPECT_EQ(f(low, low), dtypes_of(low, low));
  const Autocast region(policy());
  EXPECT_EQ(f(wide, low), dtypes_of(wide, wide));
}

TEST_P(Callables, PromoteFunctionCastsToTheWidest) {
  const auto f = promote_function(dtypes_of);
  const auto other = low.to(GetParam() == kFp16 ? kBf16 : kFp16);
  EXPECT_EQ(f(wide, low), dtypes_of(wide, low));
  const Autocast region(policy());
  EXPECT_EQ(f(wide, low), dtypes_of(wide, wide));
  EXPECT_EQ(f(low, wide), dtypes_of(wide, wide));
  EXPECT_EQ(f(low, low), dtypes_of(low, low)) << "nothing is lowered";
  EXPECT_EQ(f(low, other), dtypes_of(wide, wide));
  EXPECT_EQ(f(other, other), dtypes_of(other, other));
}

TEST_P(Callables, RunWithCastsOff) {
  const auto product = [](const at::Tensor& a) { return at::mm(a, a).scalar_type(); };
  const Autocast region(CastPolicy::semitone({torch::kCPU, GetParam()}));
  EXPECT_EQ(product(wide), GetParam());
  EXPECT_EQ(float_function(product)(wide), kFp32);
  EXPECT_EQ(float_function(product)(low), kFp32);
  EXPECT_EQ(promote_function(product)(wide), kFp32);
  EXPECT_EQ(half_function(product)(wide), GetParam());
  EXPECT_EQ(product(wide), GetParam()) << "on again afterwards";
}

// Where LibTorch's list is in force, LibTorch's kernels run for operators that the policy does not
// list: they would cast.
TEST_P(Callables, RunWithCastsOffUnderPresetTorchToo) {
  const auto product = [](const at::Tensor& a) { return at::mm(a, a).scalar_type(); };
  const auto sum = [](const at::Tensor& a) { return at::prod(a).scalar_type(); };
  const Autocast region(CastPolicy::torch({torch::kCPU, GetParam()}));
  EXPECT_EQ(promote_function(product)(wide), kFp32);
  EXPECT_EQ(half_function(sum)(wide), GetParam());
  EXPECT_EQ(sum(low), kFp32) << "LibTorch's CPU list has it in fp32";
}

TEST_P(Callables, LeaveOtherTensorsAlone) {
  const auto wider = wide.to(torch::kDouble);
  const auto whole = wide.to(torch::kLong);
  const auto f = [](const auto&... tensors) { return c10::str(tensors.scalar_type()...); };
  const auto elsewhere = torch::ones({2}, torch::kMeta);
  const Autocast region(policy());
  EXPECT_EQ(half_function(f)(wider, whole, elsewhere), f(wider, whole, elsewhere));
  EXPECT_EQ(float_function(f)(wider, whole, elsewhere), f(wider, whole, elsewhere));
  EXPECT_EQ(promote_function(f)(wider, whole, low), f(wider, whole, low)) << "fp64 does not widen";
  EXPECT_EQ(half_function([](const at::Tensor& t) { return t.defined(); })(at::Tensor()), false);
}

TEST_P(Callables, CastTensorsInsideContainers) {
  const auto f = half_function(
      [](const std::vector<at::Tensor>& list, const std::map<std::string, at::Tensor>& named,
         const std::optional<at::Tensor>& maybe, const std::tuple<at::Tensor, int>& pair,
         const c10::IValue& value) {
        return std::vector<c10::ScalarType>{
            list[0].scalar_type(), named.at("a").scalar_type(), maybe->scalar_type(),
            std::get<0>(pair).scalar_type(),
            value.toTuple()->elements()[1].toTensorVector()[0].scalar_type()};
      });
  const Autocast region(policy());
  const c10::IValue nested = c10::ivalue::Tuple::create({1, std::vector<at::Tensor>{wide}});
  const std::map<std::string, at::Tensor> named{{"a", wide}};
  EXPECT_EQ(f(std::vector<at::Tensor>{wide}, named, std::optional<at::Tensor>(wide),
              std::tuple<at::Tensor, int>(wide, 1), nested),
            std::vector<c10::ScalarType>(5, GetParam()));
}

TEST_P(Callables, PassOtherArgumentsOnAsTheyCome) {
  const auto f = half_function(
      [](const at::Tensor& tensor, int& calls, std::unique_ptr<int> owned, const char* text) {
        ++calls;
        return c10::str(tensor.scalar_type(), *owned, text);
      });
  int calls = 0;
  EXPECT_EQ(f(wide, calls, std::make_unique<int>(7), "x"), "Float7x");
  const Autocast region(policy());
  EXPECT_EQ(f(wide, calls, std::make_unique<int>(7), "x"), c10::str(GetParam(), "7x"));
  EXPECT_EQ(calls, 2);
}

TEST_P(Callables, MayBeMembersAndReturnNothing) {
  struct Layer {
    at::Tensor weight = torch::ones({2, 2});
    at::Tensor forward(const at::Tensor& input) const {
      return at::mm(input, weight.to(input.scalar_type()));
    }
  };
  const Layer layer;
  const auto forward = register_half_function(&Layer::forward);
  c10::ScalarType seen = kFp32;
  const auto silent =
      register_float_function([&seen](const at::Tensor& t) { seen = t.scalar_type(); });
  const Autocast region(policy());
  EXPECT_EQ(forward(layer, wide).scalar_type(), GetParam());
  silent(low);
  EXPECT_EQ(seen, kFp32);
  EXPECT_EQ(register_promote_function(dtypes_of)(low, wide), dtypes_of(wide, wide));
}

TEST_P(Callables, RestoreWhenTheFunctionThrows) {
  const auto f =
      half_function([](const at::Tensor&) -> int { throw std::runtime_error("for the test"); });
  const Autocast region(policy());
  EXPECT_THROW(f(wide), std::runtime_error);
  EXPECT_TRUE(autocast_enabled(torch::kCPU));
}

TEST_P(Callables, TakeWeightsFromTheCacheAndGiveThemGradients) {
  const auto weight = torch::rand({2, 3}).requires_grad_();
  const auto f =
      half_function([](const at::Tensor& a, const at::Tensor& b) { return at::mm(a, b); });
  const test::CastRecording casts;
  {
    const Autocast region(policy());
    (f(wide, weight) + f(wide, weight)).sum().backward();
  }
  // The operator inside has casts of its own where fp16 is emulated.
  std::vector<bool> cached;
  for (const auto& cast : casts->heard()) {
    if (cast.op == "half_function" && cast.numel == 6) cached.push_back(cast.cached);
  }
  EXPECT_EQ(cached, (std::vector{false, true}));
  expect_bitwise_equal(weight.grad(), torch::full({2, 3}, 4.0));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Callables, testing::Values(kBf16, kFp16), [](const auto& tested) {
  return std::string(c10::toString(tested.param));
});

// ---- autograd functions ------------------------------------------------------------------------

// Records the dtypes in forward and backward: of the input, and of a matrix product of fp32
// tensors.
struct Seen {
  c10::ScalarType input = c10::ScalarType::Undefined;
  c10::ScalarType forward = c10::ScalarType::Undefined;
  c10::ScalarType backward = c10::ScalarType::Undefined;
  bool enabled_in_backward = false;
};

c10::ScalarType product_dtype() {
  return at::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

struct Cube : torch::autograd::Function<Cube> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            std::optional<c10::ScalarType> cast_inputs, Seen* seen) {
    const CustomForward scope(ctx, cast_inputs);
    const at::Tensor input = scope.cast(x);
    ctx->save_for_backward({input});
    ctx->saved_data["seen"] = reinterpret_cast<std::int64_t>(seen);
    seen->input = input.scalar_type();
    seen->forward = product_dtype();
    return input * input * input;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const CustomBackward scope(ctx);
    auto* seen = reinterpret_cast<Seen*>(ctx->saved_data["seen"].toInt());
    seen->backward = product_dtype();
    seen->enabled_in_backward = autocast_enabled(torch::kCPU);
    const auto x = ctx->get_saved_variables()[0];
    return {3 * x * x * grads[0], {}, {}};
  }
};

class CustomFunctions : public testing::Test {
 protected:
  at::Tensor run(const std::optional<CastPolicy>& policy,
                 std::optional<c10::ScalarType> cast_inputs) {
    std::optional<Autocast> region;
    if (policy.has_value()) region.emplace(*policy);
    return Cube::apply(x, cast_inputs, &seen);
  }

  at::Tensor x = torch::full({2}, 2.0).requires_grad_();
  CastPolicy fp16 = CastPolicy::semitone({torch::kCPU, kFp16});
  CastPolicy bf16 = CastPolicy::semitone({torch::kCPU, kBf16});
  Seen seen;
};

TEST_F(CustomFunctions, WithoutCastInputsRunAsTheRegionSaysForwardAndBackward) {
  const auto y = run(fp16, std::nullopt);
  EXPECT_EQ(seen.input, kFp32);
  EXPECT_EQ(seen.forward, kFp16);
  y.sum().backward();  // after the region
  EXPECT_EQ(seen.backward, kFp16);
  EXPECT_FALSE(autocast_enabled(torch::kCPU));
  expect_bitwise_equal(x.grad(), torch::full({2}, 12.0));
}

TEST_F(CustomFunctions, WithCastInputsCastAndRunWithoutCasts) {
  const auto y = run(fp16, kFp32);
  EXPECT_EQ(seen.forward, kFp32);
  {
    const Autocast other(bf16);
    y.sum().backward();  // in another region
    EXPECT_EQ(product_dtype(), kBf16);
  }
  EXPECT_EQ(seen.backward, kFp32);
  EXPECT_FALSE(seen.enabled_in_backward);

  EXPECT_EQ(run(fp16, kFp16).scalar_type(), kFp16);
  EXPECT_EQ(seen.input, kFp16);
}

TEST_F(CustomFunctions, OutsideOfARegionDoNothing) {
  for (const auto cast_inputs : {std::optional<c10::ScalarType>(), std::optional(kFp16)}) {
    const auto y = run(std::nullopt, cast_inputs);
    EXPECT_EQ(seen.input, kFp32);
    EXPECT_EQ(seen.forward, kFp32);
    const Autocast region(bf16);
    y.sum().backward();
    EXPECT_EQ(seen.backward, kFp32) << "the forward was in no region, so the backward is in none";
    EXPECT_EQ(product_dtype(), kBf16);
  }
}

TEST_F(CustomFunctions, RestoreThePolicyAndNotOnlyTheDtype) {
  const auto policy = CastPolicy::semitone({torch::kCPU, kFp16}).keep_fp32("mm");
  const auto y = run(policy, std::nullopt);
  const Autocast other(bf16);
  y.sum().backward();
  EXPECT_EQ(seen.forward, kFp32);
  EXPECT_EQ(seen.backward, kFp32);
  EXPECT_TRUE(seen.enabled_in_backward);
}

TEST_F(CustomFunctions, UnderDisableCastsStayWithoutCasts) {
  at::Tensor y;
  {
    const Autocast region(fp16);
    const DisableCasts disabled;
    y = Cube::apply(x, kFp16, &seen);
  }
  EXPECT_EQ(seen.input, kFp32);
  const Autocast region(bf16);
  y.sum().backward();
  EXPECT_EQ(seen.backward, kFp32);
}

TEST_F(CustomFunctions, RunTheirBackwardOnAnyThread) {
  const auto y = run(fp16, std::nullopt).sum();
  std::thread([&y] { y.backward(); }).join();
  EXPECT_EQ(seen.backward, kFp16);
}

TEST_F(CustomFunctions, CanBeDifferentiatedTwice) {
  for (const auto& policy : {std::optional<CastPolicy>(), std::optional(fp16)}) {
    const auto y = run(policy, std::nullopt).sum();
    const auto grad = torch::autograd::grad({y}, {x}, {}, true, true)[0];
    const auto second = torch::autograd::grad({grad.sum()}, {x})[0];
    expect_close(second, torch::full({2}, 12.0), test::pointwise_tolerance(kFp16));  // 6 x
  }
}

struct Forgetful : torch::autograd::Function<Forgetful> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const CustomBackward scope(ctx);
    return {grads[0] * 2};
  }
};

TEST_F(CustomFunctions, ABackwardWithoutItsForwardIsAnError) {
  const auto y = Forgetful::apply(x).sum();
  expect_error([&] { y.backward(); },
               {"[amp.custom_backward]", "CustomForward", "at the top of forward()"});
}

TEST_F(CustomFunctions, CastContainers) {
  struct Sum : torch::autograd::Function<Sum> {
    static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& a,
                              const at::Tensor& b) {
      const CustomForward scope(ctx, kBf16);
      const auto cast = scope.cast(std::vector<at::Tensor>{a, b});
      EXPECT_EQ(scope.cast(a.to(torch::kDouble)).scalar_type(), torch::kDouble);
      EXPECT_EQ(scope.cast(5), 5);
      return cast[0] + cast[1];
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   const torch::autograd::variable_list& grads) {
      return {grads[0], grads[0]};
    }
  };
  const Autocast region(fp16);
  EXPECT_EQ(Sum::apply(x, x).scalar_type(), kBf16);
}

// The function of pytorch/examples/cpp/autograd, without support for mixed precision: forward casts
// its products, and backward multiplies a 16-bit gradient by the saved fp32 weight.
struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                            const at::Tensor& weight, const at::Tensor& bias) {
    ctx->save_for_backward({input, weight, bias});
    auto output = input.mm(weight.t());
    output += bias.unsqueeze(0).expand_as(output);
    return output;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx, const torch::autograd::variable_list& grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& grad_output = grad_outputs[0];
    return {grad_output.mm(saved[1]), grad_output.t().mm(saved[0]), grad_output.sum(0)};
  }
};

struct CustomLinear : torch::nn::Module {
  CustomLinear() {
    torch::manual_seed(3);
    weight = register_parameter("weight", torch::randn({5, 4}));
    bias = register_parameter("bias", torch::randn({5}));
    head = register_module("head", torch::nn::Linear(5, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    return head(torch::relu(LinearFunction::apply(x, weight, bias)));
  }
  at::Tensor weight;
  at::Tensor bias;
  torch::nn::Linear head{nullptr};
};

TEST(CustomFunctionsOfOthers, TrainAtEveryLevel) {
  const auto train = [](const std::string& level, c10::ScalarType dtype) {
    const auto model = std::make_shared<CustomLinear>();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    auto mixed =
        initialize(model, optimizer, Options(level).dtype(dtype).loss_scale(4).verbosity(0));
    torch::manual_seed(4);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      const auto loss = mixed.forward(model, torch::randn({3, 4})).pow(2).mean();
      mixed.scale_loss(loss, optimizer).backward();
      EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    }
    EXPECT_FALSE(autocast_enabled(torch::kCPU));
    std::vector<at::Tensor> trained;
    for (const at::Tensor& parameter : mixed.master_params(optimizer))
      trained.push_back(parameter.detach().to(kFp32));
    return trained;
  };
  const auto before = CustomLinear().parameters();
  const auto want = train("O0", kBf16);
  for (const auto dtype : {kBf16, kFp16}) {
    for (const char* level : {"O1", "O2"}) {
      SCOPED_TRACE(c10::str(level, " ", dtype));
      const auto got = train(level, dtype);
      for (std::size_t i = 0; i < want.size(); ++i) {
        const auto moved = want[i] - before[i].detach();
        const double error = ((got[i] - want[i]).norm() / moved.norm()).item<double>();
        EXPECT_LT(error, dtype == kFp16 ? 0.01 : 0.08) << i;
      }
    }
  }
}

TEST(CustomFunctionsOfOthers, TrainInARegionIfBackwardRunsThere) {
  const auto model = std::make_shared<CustomLinear>();
  const Autocast region(torch::kCPU, kBf16);
  model->forward(torch::randn({3, 4})).to(kFp32).sum().backward();
  EXPECT_EQ(model->weight.grad().scalar_type(), kFp32);
}

}  // namespace
}  // namespace semitone::amp::functions_test
