// The steps of all fused optimizers: skipping, dtypes, layouts, and writing the model.

#include "semitone/optim/fused_optimizer.h"

#include "semitone/core/dtype.h"
#include "src/optim/fused_state.h"
#include "tests/optim/all_fused_optimizers.h"
#include "tests/optim/fused_optimizers_fixture.h"
#include "tests/support/archive.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <vector>

namespace semitone::test {
namespace {

using optim::FusedStep;

TEST_P(FusedOptimizers, MoveEveryParameterThatHasAGradient) {
  const auto parameters = make_parameters();
  const auto before = leaves_like(parameters);
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_EQ(optimizer->steps_of(parameters[i]), 1);
    if (parameters[i].numel() > 1) {
      EXPECT_FALSE(torch::equal(parameters[i], before[i])) << i;
    }
  }
}

// LibTorch's map has the state by the parameter's address. A new parameter at the address of one
// that was freed would get its state.
TEST_P(FusedOptimizers, KeepTheAddressesOfTheirParameters) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  std::vector<std::size_t> references;
  for (const at::Tensor& parameter : parameters) references.push_back(parameter.weak_use_count());
  for (int step = 0; step < 2; ++step) plain_step(*optimizer, parameters, make_grads(parameters));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    EXPECT_EQ(parameters[i].weak_use_count(), references[i] + 1) << i;
  auto archive = saved(*optimizer);
  optimizer->load(archive);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    EXPECT_EQ(parameters[i].weak_use_count(), references[i] + 1) << i;
}

TEST_P(FusedOptimizers, DivideScaledGradientsInTheSamePass) {
  expect_same_steps(plain_step, [](auto& optimizer, auto& parameters, auto& grads) {
    set_grads(parameters, grads, 1024);
    EXPECT_TRUE(optimizer.step(FusedStep().inv_scale(1.0 / 1024)));
  });
}

TEST_P(FusedOptimizers, ClipInTheSamePass) {
  expect_same_steps(
      [](auto& optimizer, auto& parameters, auto& grads) {
        set_grads(parameters, grads, 0.25);
        optimizer.step();
      },
      [](auto& optimizer, auto& parameters, auto& grads) {
        set_grads(parameters, grads, 1024);
        optimizer.step(FusedStep().inv_scale(1.0 / 1024).clip(0.25));
      });
}

TEST_P(FusedOptimizers, LeaveTheGradientsAlone) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  const auto grads = make_grads(parameters);
  set_grads(parameters, grads);
  optimizer->step(FusedStep().inv_scale(0.5));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    expect_bitwise_equal(parameters[i].grad(), grads[i]);
}

TEST_P(FusedOptimizers, ChangeNothingWhereFoundInfIsSet) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  const auto skip = [&](const at::Tensor& flag) {
    auto grads = make_grads(parameters);
    grads[0].fill_(nan);
    set_grads(parameters, grads);
    return optimizer->step(FusedStep().found_inf(flag));
  };
  const auto untouched = everything(*optimizer);
  EXPECT_FALSE(skip(torch::ones({1})));  // before there is any state
  expect_bitwise_equal(everything(*optimizer), untouched);
  EXPECT_TRUE(optimizer->state().empty());

  plain_step(*optimizer, parameters, make_grads(parameters));
  const auto before = everything(*optimizer);
  EXPECT_FALSE(skip(torch::ones({})));
  EXPECT_FALSE(skip(torch::full({1}, 2.0)));
  EXPECT_FALSE(skip(torch::full({1}, nan))) << "a broken flag must not let a step through";
  EXPECT_FALSE(skip(torch::ones({1}, at::kBool)));
  expect_bitwise_equal(everything(*optimizer), before);

  set_grads(parameters, make_grads(parameters));
  EXPECT_TRUE(optimizer->step(FusedStep().found_inf(torch::zeros({1}))));
  EXPECT_EQ(optimizer->steps_of(parameters[0]), 2);
}

TEST_P(FusedOptimizers, SkippedStepsLeaveNoTrace) {
  int count = 0;
  expect_same_steps(plain_step, [&](auto& optimizer, auto& parameters, auto& grads) {
    set_grads(parameters, grads, 3);
    if (++count % 2 == 0) {
      EXPECT_FALSE(optimizer.step(FusedStep().found_inf(torch::ones({1}))));
    }
    plain_step(optimizer, parameters, grads);
  });
}

TEST_P(FusedOptimizers, LeaveParametersWithoutGradientsAlone) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  const auto before = parameters[2].detach().clone();
  for (int i = 0; i < 2; ++i) {
    auto grads = make_grads(parameters);
    grads[2] = at::Tensor();
    plain_step(*optimizer, parameters, grads);
    expect_bitwise_equal(parameters[2].detach(), before);
    EXPECT_EQ(optimizer->state().count(parameters[2].unsafeGetTensorImpl()), 0U);
  }
  // It then starts as if it were its first step: state and step counts are per parameter.
  const auto fresh = leaves_like(parameters);
  const auto other = GetParam()(fresh);
  for (int i = 0; i < 2; ++i) {
    const auto grads = make_grads(parameters);
    plain_step(*optimizer, parameters, grads);
    plain_step(*other, fresh, grads);
    expect_bitwise_equal(parameters[2].detach(), fresh[2].detach());
    EXPECT_EQ(optimizer->steps_of(parameters[2]), i + 1);
    EXPECT_EQ(optimizer->steps_of(parameters[0]), i + 3);
  }
}

TEST_P(FusedOptimizers, TakeGradientsInAnotherDtype) {
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
    SCOPED_TRACE(dtype_name(dtype));
    expect_same_steps(plain_step, [&](auto& optimizer, auto& parameters, auto& grads) {
      for (std::size_t i = 0; i < parameters.size(); ++i)
        parameters[i].mutable_grad() = grads[i].to(dtype);
      optimizer.step();
    });
  }
}

TEST_P(FusedOptimizers, WriteTheModelInTheSamePass) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    SCOPED_TRACE(dtype_name(dtype));
    std::vector<at::Tensor> models;
    optim::ModelCopies copies;
    expect_same_steps(plain_step, [&](auto& optimizer, auto& parameters, auto& grads) {
      if (models.empty()) {
        for (const at::Tensor& parameter : parameters) {
          models.push_back(parameter.detach().to(dtype).requires_grad_());
          copies[parameter.unsafeGetTensorImpl()] = models.back();
        }
      }
      set_grads(models, grads, 64);  // the masters have none
      EXPECT_TRUE(optimizer.step(FusedStep().inv_scale(1.0 / 64).copies(&copies)));
      for (std::size_t i = 0; i < parameters.size(); ++i)
        expect_bitwise_equal(models[i].detach(), parameters[i].detach().to(dtype));
    });
  }
}

TEST_P(FusedOptimizers, DoNotWriteTheModelWhereTheyDoNotStep) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  optim::ModelCopies copies;
  std::vector<at::Tensor> models;
  for (const at::Tensor& parameter : parameters) {
    models.push_back(torch::full(parameter.sizes(), 5, at::kBFloat16).requires_grad_());
    copies[parameter.unsafeGetTensorImpl()] = models.back();
  }
  const auto before = leaves_like(models);
  set_grads(models, make_grads(parameters));
  EXPECT_FALSE(optimizer->step(FusedStep().copies(&copies).found_inf(torch::ones({1}))));
  for (std::size_t i = 0; i < models.size(); ++i)
    expect_bitwise_equal(models[i].detach(), before[i].detach());
}

// A 16-bit parameter without a master: one step is fp32's, rounded once.
TEST_P(FusedOptimizers, RoundA16BitParameterOnce) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    if (GetParam().splits_masters) continue;
    SCOPED_TRACE(dtype_name(dtype));
    const auto narrow = make_parameters(dtype);
    std::vector<at::Tensor> wide;
    for (const at::Tensor& parameter : narrow)
      wide.push_back(parameter.detach().to(at::kFloat).requires_grad_());
    const auto narrow_optimizer = GetParam()(narrow);
    const auto wide_optimizer = GetParam()(wide);
    const auto grads = make_grads(wide);
    plain_step(*narrow_optimizer, narrow, grads);
    plain_step(*wide_optimizer, wide, grads);
    for (std::size_t i = 0; i < wide.size(); ++i)
      expect_bitwise_equal(narrow[i].detach(), wide[i].detach().to(dtype));
  }
}

TEST_P(FusedOptimizers, Fp64ParametersAreComputedInFp64) {
  const auto parameters = make_parameters(at::kDouble);
  std::vector<at::Tensor> narrow;
  for (const at::Tensor& parameter : parameters)
    narrow.push_back(parameter.detach().to(at::kFloat).requires_grad_());
  // Values that fp32 cannot represent.
  {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters) parameter.add_(1e-12);
  }
  const auto optimizer = GetParam()(parameters);
  const auto narrow_optimizer = GetParam()(narrow);
  for (int i = 0; i < 3; ++i) {
    const auto grads = make_grads(parameters);
    plain_step(*optimizer, parameters, grads);
    plain_step(*narrow_optimizer, narrow, grads);
  }
  for (std::size_t i = 0; i < narrow.size(); ++i) {
    if (narrow[i].numel() == 0) continue;
    const double far = (parameters[i].detach() - narrow[i].detach()).abs().max().item<double>();
    EXPECT_TRUE(far < 1e-5) << far;
    EXPECT_TRUE(far > 1e-13) << far;
  }
}

TEST_P(FusedOptimizers, GiveTheSameNumbersInEveryLayout) {
  const auto values = torch::randn({4, 3, 5, 6});
  const auto contiguous = values.clone().requires_grad_();
  const auto channels_last =
      values.contiguous(at::MemoryFormat::ChannelsLast).detach().requires_grad_();
  const auto gaps = torch::zeros({4, 3, 5, 12}).slice(3, 0, 12, 2).copy_(values).requires_grad_();
  const auto a = GetParam()(std::vector<at::Tensor>{contiguous});
  const auto b = GetParam()(std::vector<at::Tensor>{channels_last});
  const auto c = GetParam()(std::vector<at::Tensor>{gaps});
  for (int i = 0; i < 3; ++i) {
    const auto grad = torch::randint(-127, 128, values.sizes()).to(at::kFloat) / 64;
    contiguous.mutable_grad() = grad;
    channels_last.mutable_grad() = grad;  // in another layout than its parameter
    gaps.mutable_grad() = at::_neg_view(grad.neg());
    a->step();
    b->step();
    c->step();
    expect_close(channels_last.detach(), contiguous.detach(), 1e-6);
    expect_close(gaps.detach(), contiguous.detach(), 1e-6);
  }
  EXPECT_TRUE(channels_last.is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST_P(FusedOptimizers, MayTakeTheirFirstStepInInferenceMode) {
  // fp64 is for the reference, which writes through ATen.
  const auto parameters = make_parameters(GetParam().splits_masters ? at::kBFloat16 : at::kDouble);
  std::vector<std::vector<at::Tensor>> ends;
  for (const bool in_inference_mode : {false, true}) {
    const auto leaves = leaves_like(parameters);
    const auto optimizer = GetParam()(leaves);
    torch::manual_seed(4);
    set_grads(leaves, make_grads(leaves));
    {
      const c10::InferenceMode mode(in_inference_mode);
      optimizer->step();
    }
    plain_step(*optimizer, leaves, make_grads(leaves));
    ends.push_back(everything(*optimizer));
  }
  expect_bitwise_equal(ends[1], ends[0]);
}

TEST_P(FusedOptimizers, StateFollowsAParameterThatIsCastOrLaidOutAnew) {
  if (GetParam().splits_masters) return;  // a master has no other dtype
  const auto values = torch::randn({4, 3, 5, 6});
  auto moved = values.clone().requires_grad_();
  const auto stays = values.clone().requires_grad_();
  const auto a = GetParam()(std::vector<at::Tensor>{moved});
  const auto b = GetParam()(std::vector<at::Tensor>{stays});
  for (int i = 0; i < 4; ++i) {
    if (i == 1) moved.set_data(moved.detach().contiguous(at::MemoryFormat::ChannelsLast));
    if (i == 2) moved.set_data(moved.detach().to(at::kDouble));
    if (i == 3) moved.set_data(moved.detach().to(at::kFloat));
    const auto grad = torch::randint(-127, 128, values.sizes()).to(at::kFloat) / 64;
    moved.mutable_grad() = grad.to(moved.scalar_type());
    stays.mutable_grad() = grad;
    a->step();
    b->step();
  }
  expect_close(moved.detach(), stays.detach(), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(All, FusedOptimizers, testing::ValuesIn(all_fused_optimizers()),
                         [](const auto& which) { return which.param.name; });

}  // namespace
}  // namespace semitone::test
