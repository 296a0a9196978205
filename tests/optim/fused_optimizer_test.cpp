// The common behaviour of all fused optimizers.

#include "semitone/optim/fused_optimizer.h"

#include "semitone/core/dtype.h"
#include "tests/optim/all_fused_optimizers.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::test {
namespace {

using optim::FusedOptimizer;
using optim::FusedStep;

using Shape = std::vector<std::int64_t>;

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> kShapes{{7}, {}, {33, 5}, {0}, {2, 3, 4, 5}};
  return kShapes;
}

std::vector<at::Tensor> make_parameters(c10::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> parameters;
  for (const Shape& shape : shapes())
    parameters.push_back(torch::randn(shape).to(dtype).requires_grad_());
  return parameters;
}

std::vector<at::Tensor> clones(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors)
    copies.push_back(tensor.detach().clone().requires_grad_());
  return copies;
}

// Gradients that are exact in every dtype, and stay so when they are scaled by powers of two.
std::vector<at::Tensor> make_grads(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> grads;
  for (const at::Tensor& parameter : parameters)
    grads.push_back(torch::randint(-127, 128, parameter.sizes()).to(at::kFloat) / 64);
  return grads;
}

void set_grads(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& grads,
               double scale = 1) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() =
        grads[i].defined() ? (grads[i] * scale).to(parameters[i].scalar_type()) : at::Tensor();
  }
}

// Everything that an optimizer holds, as one list for comparison.
std::vector<at::Tensor> everything(const FusedOptimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      all.push_back(parameter.detach().clone());
      all.push_back(torch::tensor(optimizer.steps_of(parameter)));
      const auto entry = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (entry == optimizer.state().end()) continue;
      const auto& state = static_cast<const optim::FusedState&>(*entry->second);
      for (const at::Tensor& tensor : state.tensors)
        if (tensor.defined()) all.push_back(tensor.clone());
      if (state.master_low.defined()) all.push_back(state.master_low.clone());
    }
  }
  return all;
}

void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE("tensor " + std::to_string(i));
    expect_bitwise_equal(got[i], want[i]);
  }
}

class FusedOptimizers : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override { torch::manual_seed(7); }

  // Steps two optimizers over the same values, each by its own method, and compares everything they
  // hold.
  template <typename StepA, typename StepB>
  void expect_same_steps(const StepA& step_a, const StepB& step_b, int count = 4) {
    const auto a = make_parameters();
    const auto b = clones(a);
    const auto optimizer_a = GetParam()(a);
    const auto optimizer_b = GetParam()(b);
    for (int i = 0; i < count; ++i) {
      const auto grads = make_grads(a);
      step_a(*optimizer_a, a, grads);
      step_b(*optimizer_b, b, grads);
      expect_same(everything(*optimizer_b), everything(*optimizer_a));
    }
  }
};

void plain_step(FusedOptimizer& optimizer, const std::vector<at::Tensor>& parameters,
                const std::vector<at::Tensor>& grads) {
  set_grads(parameters, grads);
  optimizer.step();
}

TEST_P(FusedOptimizers, MoveEveryParameterThatHasAGradient) {
  const auto parameters = make_parameters();
  const auto before = clones(parameters);
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_EQ(optimizer->steps_of(parameters[i]), 1);
    if (parameters[i].numel() > 1) {
      EXPECT_FALSE(torch::equal(parameters[i], before[i])) << i;
    }
  }
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
  expect_same(everything(*optimizer), untouched);
  EXPECT_TRUE(optimizer->state().empty());

  plain_step(*optimizer, parameters, make_grads(parameters));
  const auto before = everything(*optimizer);
  EXPECT_FALSE(skip(torch::ones({})));
  EXPECT_FALSE(skip(torch::full({1}, 2.0)));
  EXPECT_FALSE(skip(torch::full({1}, nan))) << "a broken flag must not let a step through";
  EXPECT_FALSE(skip(torch::ones({1}, at::kBool)));
  expect_same(everything(*optimizer), before);

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
  const auto fresh = clones(parameters);
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
  const auto before = clones(models);
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

// ---- layouts ------------------------------------------------------------------------------------

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

// ---- as an optimizer of LibTorch ----------------------------------------------------------------

TEST_P(FusedOptimizers, StepGroupsThatAreAddedLaterByTheirOwnOptions) {
  const std::vector<at::Tensor> parameters{torch::randn({7}).requires_grad_(),
                                           torch::randn({33, 5}).requires_grad_()};
  const auto optimizer = GetParam()(std::vector<at::Tensor>{parameters[0]});
  plain_step(*optimizer, {parameters[0]}, make_grads({parameters[0]}));
  optimizer->add_param_group(torch::optim::OptimizerParamGroup({parameters[1]}));
  optimizer->param_groups()[1].options().set_lr(0.5);
  const auto fresh = clones(parameters);
  const auto other = GetParam()(fresh);
  other->param_groups()[0].options().set_lr(0.5);
  for (int i = 0; i < 2; ++i) {
    const auto grads = make_grads(parameters);
    plain_step(*optimizer, parameters, grads);
    plain_step(*other, fresh, grads);
    expect_bitwise_equal(parameters[1].detach(), fresh[1].detach());
    EXPECT_FALSE(torch::equal(parameters[0], fresh[0])) << "it has its own learning rate";
  }
}

// A weight that no longer gets a gradient: its momentum does not stay at a few units of the
// smallest subnormal number, with which some processors compute ten times slower.
TEST_P(FusedOptimizers, StateThatFadesEndsAtZero) {
  const at::Tensor weight = torch::zeros({37}).requires_grad_();
  const auto optimizer = GetParam()({weight});
  weight.mutable_grad() = torch::ones({37});
  optimizer->step();
  const at::Tensor state = optimizer->state_of(weight, GetParam().first_state);
  if (!state.defined()) return;  // SGD without momentum
  {
    const at::NoGradGuard no_grad;
    weight.zero_();
  }
  weight.mutable_grad() = torch::zeros({37});
  state.fill_(2e-38);  // twice the smallest normal number
  for (int i = 0; i < 30; ++i) {
    optimizer->step();
    const at::Tensor now = state.abs();
    EXPECT_FALSE(
        now.gt(0).logical_and(now.lt(std::numeric_limits<float>::min())).any().item<bool>())
        << now[0];
  }
  EXPECT_EQ(state.eq(0).all().item<bool>(), GetParam().name != "adagrad");  // a sum does not fade
}

TEST_P(FusedOptimizers, FollowLearningRateSchedulers) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  const double lr = optimizer->param_groups()[0].options().get_lr();
  torch::optim::StepLR schedule(*optimizer, 2, 0.0);
  // LibTorch's StepLR looks at the steps before this one: with 2, the third changes the rate.
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), lr);
    plain_step(*optimizer, parameters, make_grads(parameters));
    schedule.step();
  }
  EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), 0);
  EXPECT_EQ(optimizer->defaults().get_lr(), lr);
  const auto before = clones(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    EXPECT_TRUE(torch::equal(parameters[i], before[i])) << "the learning rate is 0";
}

TEST_P(FusedOptimizers, EvaluateAClosureWithGradientsEnabled) {
  const auto weight = torch::ones({3}).requires_grad_();
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  const at::NoGradGuard no_grad;
  const at::Tensor loss = optimizer->step([&] {
    optimizer->zero_grad();
    at::Tensor value = weight.square().sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<float>(), 3);
  EXPECT_TRUE((weight < 1).all().item<bool>());
  EXPECT_FALSE(optimizer->step().defined());
}

TEST_P(FusedOptimizers, StepAParameterThatStandsTwiceOnce) {
  const auto once = torch::randn({50}).requires_grad_();
  const auto twice = once.detach().clone().requires_grad_();
  const auto a = GetParam()(std::vector<at::Tensor>{once});
  const auto b = GetParam()(std::vector<at::Tensor>{twice, twice});
  for (int i = 0; i < 2; ++i) {
    once.mutable_grad() = torch::ones({50});
    twice.mutable_grad() = torch::ones({50});
    a->step();
    b->step();
  }
  expect_bitwise_equal(twice.detach(), once.detach());
}

TEST_P(FusedOptimizers, MarkParametersAsChangedForAutograd) {
  const auto weight = torch::ones({3}).requires_grad_();
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  const auto saved = weight.exp().mul(weight).sum();
  weight.mutable_grad() = torch::ones({3});
  optimizer->step();
  EXPECT_THROW(saved.backward(), c10::Error);
}

// ---- files --------------------------------------------------------------------------------------

std::string saved(const FusedOptimizer& optimizer) {
  std::ostringstream file;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(file);
  return file.str();
}

void load(FusedOptimizer& optimizer, const std::string& bytes) {
  std::istringstream file(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  optimizer.load(archive);
}

TEST_P(FusedOptimizers, GoOnBitForBitFromAFile) {
  const auto dtype = GetParam().splits_masters ? at::kBFloat16 : at::kFloat;
  const auto parameters = make_parameters(dtype);
  parameters[4].set_data(parameters[4].detach().contiguous(at::MemoryFormat::ChannelsLast));
  const auto optimizer = GetParam()(parameters);
  for (int i = 0; i < 3; ++i) {
    auto grads = make_grads(parameters);
    if (i == 0) grads[2] = at::Tensor();
    grads[1] = at::Tensor();  // never
    plain_step(*optimizer, parameters, grads);
    optimizer->param_groups()[0].options().set_lr(0.001 * (i + 1));
  }
  const auto resumed_parameters = clones(parameters);
  const auto resumed = GetParam()(resumed_parameters);
  plain_step(*resumed, clones(parameters), make_grads(parameters));  // state that must go away
  load(*resumed, saved(*optimizer));
  expect_same(everything(*resumed), everything(*optimizer));
  EXPECT_EQ(resumed->param_groups()[0].options().get_lr(), 0.003);
  EXPECT_EQ(saved(*resumed), saved(*optimizer)) << "files have no addresses in them";
  for (int i = 0; i < 3; ++i) {
    const auto grads = make_grads(parameters);
    plain_step(*optimizer, parameters, grads);
    plain_step(*resumed, resumed_parameters, grads);
    expect_same(everything(*resumed), everything(*optimizer));
  }
}

TEST_P(FusedOptimizers, CanBeSavedBeforeTheFirstStep) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  const auto bytes = saved(*optimizer);
  plain_step(*optimizer, parameters, make_grads(parameters));
  load(*optimizer, bytes);
  EXPECT_TRUE(optimizer->state().empty());
}

TEST_P(FusedOptimizers, WorkWithTorchSaveAndLoad) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  std::stringstream file;
  torch::save(*optimizer, file);
  const auto other = GetParam()(parameters);
  torch::load(*other, file);
  expect_same(everything(*other), everything(*optimizer));
}

// As every OptimizerParamState of LibTorch: amp::MasterWeights moves state by these functions.
TEST_P(FusedOptimizers, HaveStateThatCanBeSerializedByItself) {
  const auto weight =
      torch::randn({9}).to(GetParam().splits_masters ? at::kBFloat16 : at::kFloat).requires_grad_();
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  for (int i = 0; i < 2; ++i) plain_step(*optimizer, {weight}, make_grads({weight}));
  const auto& state =
      static_cast<const optim::FusedState&>(*optimizer->state().at(weight.unsafeGetTensorImpl()));
  torch::serialize::OutputArchive written;
  state.serialize(written);
  std::stringstream file;
  written.save_to(file);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  optim::FusedState read;
  read.tensors.fill(torch::ones({1}));  // must go away where there is none
  read.master_low = torch::ones({1});
  read.serialize(archive);
  EXPECT_EQ(read.step, 2);
  for (std::size_t k = 0; k < read.tensors.size(); ++k)
    expect_bitwise_equal(read.tensors[k], state.tensors[k]);
  expect_bitwise_equal(read.master_low, state.master_low);
}

TEST_P(FusedOptimizers, RefuseFilesThatDoNotFitAndChangeNothing) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  const auto before = everything(*optimizer);
  const auto expect_refused = [&](const std::string& bytes,
                                  std::initializer_list<std::string_view> parts) {
    EXPECT_THROW(load(*optimizer, bytes), FileError);
    expect_error([&] { load(*optimizer, bytes); }, parts);
    expect_same(everything(*optimizer), before);
  };

  const auto fewer = GetParam()(std::vector<at::Tensor>{parameters[0]});
  expect_refused(saved(*fewer), {"[optim.load]", "5 parameters in group 0", "got 1"});
  fewer->add_param_group(torch::optim::OptimizerParamGroup({parameters[1]}));
  expect_refused(saved(*fewer), {"1 parameter groups", "got 2"});

  auto others = make_parameters();
  others[4] = torch::randn({3}).requires_grad_();
  const auto other_shapes = GetParam()(others);
  plain_step(*other_shapes, others, make_grads(others));
  if (!other_shapes->state_of(others[4], GetParam().first_state).defined()) return;
  expect_refused(saved(*other_shapes), {"of shape [2, 3, 4, 5]", "got [3]"});
}

TEST_P(FusedOptimizers, RefuseFilesWithOptionsOutOfRangeAndChangeNothing) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  const auto before = everything(*optimizer);
  const double lr = optimizer->param_groups()[0].options().get_lr();
  const auto bad = GetParam()(make_parameters());
  bad->param_groups()[0].options().set_lr(-1);
  expect_error([&] { load(*optimizer, saved(*bad)); }, {"lr of at least 0", "-1"});
  EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), lr);
  expect_same(everything(*optimizer), before);
}

TEST_P(FusedOptimizers, RefuseArchivesOfSomethingElse) {
  const auto optimizer = GetParam()(make_parameters());
  const auto refuse = [&](const std::function<void(torch::serialize::OutputArchive&)>& fill) {
    std::ostringstream file;
    torch::serialize::OutputArchive archive;
    fill(archive);
    archive.save_to(file);
    EXPECT_THROW(load(*optimizer, file.str()), FileError);
  };
  refuse([](auto&) {});
  refuse([](auto& archive) { archive.write("pytorch_version", c10::IValue("1.5.0")); });
  refuse([](auto& archive) { archive.write("pytorch_version", c10::IValue("0.9")); });
  refuse([](auto& archive) { archive.write("pytorch_version", c10::IValue(1)); });
  refuse([](auto& archive) {
    archive.write("pytorch_version", c10::IValue("1.5.0"));
    archive.write("state", torch::ones({3}));
    archive.write("param_groups", torch::ones({3}));
  });
}

// ---- errors -------------------------------------------------------------------------------------

TEST_P(FusedOptimizers, RefuseSparseGradientsBeforeAnythingIsChanged) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  const auto before = everything(*optimizer);
  set_grads(parameters, make_grads(parameters));
  parameters[2].mutable_grad() = parameters[2].grad().to_sparse();
  expect_error([&] { optimizer->step(); },
               {"[optim.", "dense gradients", "Sparse for parameter 2 of group 0"});
  expect_same(everything(*optimizer), before);
}

TEST_P(FusedOptimizers, NameWhatIsWrong) {
  const auto weight = torch::ones({3}).requires_grad_();
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  const auto step = [&](const FusedStep& how = {}) { return [&, how] { optimizer->step(how); }; };
  weight.mutable_grad() = torch::ones({4});
  expect_error(step(), {"shape [3]", "[4]", "parameter 0 of group 0"});
  weight.mutable_grad() = torch::ones({3}, at::kInt);
  expect_error(step(), {"int32"});
  weight.mutable_grad() = torch::ones({3});
  expect_error(step(FusedStep().found_inf(torch::zeros({2}))), {"found_inf of one element", "[2]"});
  expect_error(step(FusedStep().inv_scale(std::numeric_limits<double>::infinity())),
               {"an inv_scale * clip that float32 holds", "inf"});
  expect_error(step(FusedStep().inv_scale(1e20).clip(1e20)), {"float32 holds", "1e+40"});
  expect_error(step(FusedStep().clip(std::numeric_limits<double>::quiet_NaN())), {"nan"});

  const auto with_copy = [&](const at::Tensor& copy,
                             std::initializer_list<std::string_view> parts) {
    const optim::ModelCopies copies{{weight.unsafeGetTensorImpl(), copy}};
    expect_error(step(FusedStep().copies(&copies)), parts);
  };
  with_copy({}, {"a model copy of shape [3]", "undefined"});
  with_copy(torch::ones({4}, at::kHalf), {"[3]", "[4]"});
  with_copy(torch::ones({3}, at::kInt), {"int32"});
  with_copy(weight.detach(), {"memory of its own"});
  auto copy = torch::ones({3}, at::kHalf).requires_grad_();
  copy.mutable_grad() = torch::ones({3}, at::kHalf);
  with_copy(copy, {"one gradient for parameter 0 of group 0", "one of the model copy"});

  expect_error([&] { optimizer->state_of(weight, "momentum"); },
               {"one of the state's names, ", "got momentum"});
  weight.set_data(torch::ones({3}, at::kComplexFloat));
  weight.mutable_grad() = torch::ones({3}, at::kComplexFloat);
  expect_error(step(), {"float32, float16, bfloat16 or float64", "complex64"});
}

TEST_P(FusedOptimizers, RefuseOptionsOfAnotherOptimizerOrOutOfRange) {
  const auto weight = torch::ones({3}).requires_grad_();
  weight.mutable_grad() = torch::ones({3});
  const Groups foreign{torch::optim::OptimizerParamGroup(
      {weight}, std::make_unique<torch::optim::RMSpropOptions>(0.1))};
  expect_error([&] { GetParam().make(foreign); }, {"[optim.", "its own options"});
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  optimizer->add_param_group(torch::optim::OptimizerParamGroup(
      {torch::ones({2})}, std::make_unique<torch::optim::RMSpropOptions>(0.1)));
  expect_error([&] { optimizer->step(); }, {"its own options"});
  EXPECT_TRUE(torch::equal(weight, torch::ones({3})));

  const auto other = GetParam()(std::vector<at::Tensor>{weight});
  for (const double lr :
       {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    other->param_groups()[0].options().set_lr(lr);
    expect_error([&] { other->step(); }, {"lr of at least 0"});
  }
  EXPECT_TRUE(torch::equal(weight, torch::ones({3})));
}

TEST_P(FusedOptimizers, RefuseAParameterThatWasResized) {
  auto weight = torch::ones({3}).requires_grad_();
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  weight.mutable_grad() = torch::ones({3});
  optimizer->step();
  if (optimizer->state_of(weight, GetParam().first_state).numel() != 3) return;
  weight.mutable_grad().reset();
  weight.set_data(torch::ones({5}));
  weight.mutable_grad() = torch::ones({5});
  expect_error([&] { optimizer->step(); }, {"state of shape [5]", "got [3]", "resized"});
}

INSTANTIATE_TEST_SUITE_P(All, FusedOptimizers, testing::ValuesIn(all_fused_optimizers()),
                         [](const auto& which) { return which.param.name; });

}  // namespace
}  // namespace semitone::test
