// Operators in the dtypes that each preset, its edits, promotion and bans give them.

#include "semitone/autocast/autocast.h"
#include "semitone/core/dtype.h"
#include "semitone/nn/fused_batch_norm.h"
#include "tests/autocast/autocast_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::amp::autocast_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;
using test::expect_error;

// The presets in the order of OpCase::by_preset.
constexpr std::array<std::string_view, 5> kPresetColumns{"torch", "semitone", "apex", "paddle",
                                                         "paddle-o2"};

struct OpCase {
  const char* name;
  // What each preset of kPresetColumns does with the operator, one letter for each: l lowers to 16
  // bits, f casts to fp32, - casts nothing. "lllf-": torch, semitone and apex lower, paddle casts to
  // fp32, paddle-o2 leaves the dtypes. Preset none never casts.
  const char* by_preset;

  // The letter of a preset; nothing for one without a column.
  std::optional<char> in(std::string_view preset) const {
    if (preset == "none") return '-';
    const auto column = std::find(kPresetColumns.begin(), kPresetColumns.end(), preset);
    if (column == kPresetColumns.end()) return std::nullopt;
    return by_preset[column - kPresetColumns.begin()];
  }
  at::Tensor (*run)(const at::Tensor& x);  // x: 4x4, positive; all other arguments in its dtype
};

at::Tensor image(const at::Tensor& x) {
  return x.view({1, 1, 4, 4});
}

const std::vector<OpCase>& op_cases() {
  static const std::vector<OpCase> cases{
      {"mm", "lllll", [](const at::Tensor& x) { return at::mm(x, x); }},
      {"matmul", "lllll", [](const at::Tensor& x) { return at::matmul(x, x[0]); }},
      {"linear", "lllll", [](const at::Tensor& x) { return at::linear(x, x, x[0]); }},
      {"functional_linear", "lllll",
       [](const at::Tensor& x) { return torch::nn::functional::linear(x, x, x[0]); }},
      {"addmm", "lllll", [](const at::Tensor& x) { return at::addmm(x, x, x); }},
      {"bmm", "lllll", [](const at::Tensor& x) { return at::bmm(x.unsqueeze(0), x.unsqueeze(0)); }},
      {"baddbmm", "lll--",
       [](const at::Tensor& x) {
         return at::baddbmm(x.unsqueeze(0), x.unsqueeze(0), x.unsqueeze(0));
       }},
      {"mv", "-llll", [](const at::Tensor& x) { return at::mv(x, x[0]); }},
      {"addmv", "-ll--", [](const at::Tensor& x) { return at::addmv(x[0], x, x[0]); }},
      {"conv1d", "lll--",
       [](const at::Tensor& x) { return at::conv1d(x.view({1, 2, 8}), x.view({4, 2, 2})); }},
      {"conv2d", "lllll", [](const at::Tensor& x) { return at::conv2d(image(x), image(x)); }},
      {"conv2d_padding", "lllll",
       [](const at::Tensor& x) { return at::conv2d(image(x), image(x), {}, 1, "same"); }},
      {"functional_conv2d", "lllll",
       [](const at::Tensor& x) { return torch::nn::functional::conv2d(image(x), image(x)); }},
      {"conv_transpose2d", "lll--",
       [](const at::Tensor& x) { return at::conv_transpose2d(image(x), image(x)); }},
      // Not in the lists of torch and apex, but composed of bmm, which is.
      {"einsum", "lllll", [](const at::Tensor& x) { return at::einsum("ij,jk->ik", {x, x}); }},
      {"scaled_dot_product_attention", "ll-ll",
       [](const at::Tensor& x) {
         const auto q = image(x);
         return at::scaled_dot_product_attention(q, q, q);
       }},
      {"prelu", "lll--", [](const at::Tensor& x) { return at::prelu(x, x[0]); }},
      {"softmax", "-fff-", [](const at::Tensor& x) { return at::softmax(x, 0); }},
      {"log_softmax", "-fff-", [](const at::Tensor& x) { return at::log_softmax(x, 0); }},
      {"exp", "-fff-", [](const at::Tensor& x) { return at::exp(x); }},
      {"log", "-fff-", [](const at::Tensor& x) { return at::log(x); }},
      {"pow", "-fff-", [](const at::Tensor& x) { return at::pow(x, 2); }},
      {"pow_method", "-fff-", [](const at::Tensor& x) { return x.pow(x); }},
      {"rsqrt", "-fff-", [](const at::Tensor& x) { return at::rsqrt(x); }},
      {"softplus", "-fff-", [](const at::Tensor& x) { return at::softplus(x); }},
      {"sum", "-fff-", [](const at::Tensor& x) { return at::sum(x); }},
      {"sum_dim", "-fff-", [](const at::Tensor& x) { return x.sum(0); }},
      {"prod", "ffff-", [](const at::Tensor& x) { return at::prod(x); }},
      {"cumsum", "-fff-", [](const at::Tensor& x) { return at::cumsum(x, 0); }},
      {"norm", "-fff-", [](const at::Tensor& x) { return at::norm(x); }},
      {"linalg_vector_norm", "-f-f-",
       [](const at::Tensor& x) { return at::linalg_vector_norm(x); }},
      {"dist", "-fff-", [](const at::Tensor& x) { return at::dist(x, x); }},
      {"mean", "---f-", [](const at::Tensor& x) { return at::mean(x); }},
      {"var", "--f--", [](const at::Tensor& x) { return at::var(x); }},
      {"gelu", "--f--", [](const at::Tensor& x) { return at::gelu(x); }},
      {"square", "-fff-", [](const at::Tensor& x) { return at::square(x); }},
      {"layer_norm", "--ff-",
       [](const at::Tensor& x) { return at::layer_norm(x, {4}, x[0], x[1]); }},
      {"group_norm", "--ff-", [](const at::Tensor& x) { return at::group_norm(x, 2, x[0], x[1]); }},
      {"mse_loss", "ffff-", [](const at::Tensor& x) { return at::mse_loss(x, x); }},
      {"l1_loss", "ffff-", [](const at::Tensor& x) { return at::l1_loss(x, x); }},
      {"cross_entropy_loss", "ffff-",
       [](const at::Tensor& x) { return at::cross_entropy_loss(x, torch::tensor({0, 1, 2, 3})); }},
      {"nll_loss", "ffff-",
       [](const at::Tensor& x) { return at::nll_loss(x, torch::tensor({0, 1, 2, 3})); }},
      {"bce_with_logits", "ffff-",
       [](const at::Tensor& x) { return at::binary_cross_entropy_with_logits(x, x); }},
      {"upsample_bilinear2d", "-ffff",
       [](const at::Tensor& x) { return at::upsample_bilinear2d(image(x), {8, 8}, false); }},
      {"embedding", "---ff",
       [](const at::Tensor& x) { return at::embedding(x, torch::tensor({0, 2})); }},
      {"max_pool2d", "---ll", [](const at::Tensor& x) { return at::max_pool2d(image(x), 2); }},
      {"relu", "-----", [](const at::Tensor& x) { return at::relu(x); }},
      {"tanh", "-----", [](const at::Tensor& x) { return at::tanh(x); }},
      {"add", "-----", [](const at::Tensor& x) { return x + x; }},
      {"mul", "-----", [](const at::Tensor& x) { return x * x; }},
      {"cat", "-----", [](const at::Tensor& x) { return at::cat({x, x}); }},
      {"batch_norm_training", "-----",
       [](const at::Tensor& x) {
         return at::batch_norm(x, x[0], x[1], {}, {}, true, 0.1, 1e-5, false);
       }},
      {"batch_norm_eval", "-----",
       [](const at::Tensor& x) {
         return at::batch_norm(x, x[0], x[1], x[2].clone(), x[3].clone(), false, 0.1, 1e-5, false);
       }},
  };
  return cases;
}

class PresetOps : public testing::TestWithParam<std::tuple<std::size_t, c10::ScalarType>> {};

TEST_P(PresetOps, RunInTheDtypeOfTheirRow) {
  const OpCase& one = op_cases()[std::get<0>(GetParam())];
  const auto lower = std::get<1>(GetParam());
  torch::manual_seed(3);
  const auto x = torch::rand({4, 4}) + 0.5;
  for (const std::string& preset : CastPolicy::preset_names()) {
    SCOPED_TRACE(preset);
    const auto row = one.in(preset);
    if (!row.has_value()) continue;
    const auto policy = CastPolicy::by_name(preset, {kCpu, lower});
    for (const auto dtype : {kFp32, lower}) {
      SCOPED_TRACE(dtype_name(dtype) + " input");
      const auto input = x.to(dtype);
      // No cast is missing or superfluous: the numbers are those of explicit casts, up to the
      // rounding of the result (where fp16 is emulated, the sums inside are more exact).
      const auto run_in = row == 'l' ? lower : row == 'f' ? kFp32 : dtype;
      const at::Tensor by_hand = one.run(input.to(run_in));
      at::Tensor got;
      {
        const Autocast region(policy);
        got = one.run(input);
      }
      EXPECT_EQ(got.scalar_type(), run_in);
      expect_close(got, by_hand, test::reduction_tolerance(run_in, 16));
      EXPECT_EQ(input.scalar_type(), dtype);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Autocast, PresetOps,
                         testing::Combine(testing::Range(std::size_t{0}, op_cases().size()),
                                          testing::Values(kBf16, kFp16)),
                         [](const auto& tested) {
                           return std::string(op_cases()[std::get<0>(tested.param)].name) + "_" +
                                  dtype_name(std::get<1>(tested.param));
                         });

// Operators without a 16-bit kernel on a CPU.
TEST(AutocastPolicies, RunInFp32WhatLibTorchHasNo16BitKernelFor) {
  const auto x = torch::rand({4, 4});
  for (const char* preset : {"torch", "semitone"}) {
    SCOPED_TRACE(preset);
    const Autocast region(CastPolicy::by_name(preset, {kCpu, kBf16}));
    const auto low = x.to(kBf16);
    EXPECT_EQ(at::cdist(low, low).scalar_type(), kFp32);
    EXPECT_EQ(at::avg_pool3d(low.view({1, 1, 1, 4, 4}), 1).scalar_type(), kFp32);
    EXPECT_EQ(at::inverse(low + torch::eye(4)).scalar_type(), kFp32);
    EXPECT_EQ(std::get<0>(at::linalg_qr(low)).scalar_type(), kFp32);
    EXPECT_EQ(at::fft_rfft(low).scalar_type(), torch::kComplexFloat);
  }
}

// A policy's own edits override the preset's rows.
TEST(AutocastPolicies, ObeyEdits) {
  const auto x = torch::rand({4, 4});
  const auto policy = CastPolicy::semitone({kCpu, kBf16})
                          .keep_fp32("mm")
                          .lower("tanh")
                          .leave("softmax")
                          .keep_fp32("relu");
  const Autocast region(policy);
  EXPECT_EQ(at::mm(x.to(kBf16), x).scalar_type(), kFp32);
  EXPECT_EQ(at::tanh(x).scalar_type(), kBf16);
  EXPECT_EQ(at::softmax(x.to(kBf16), 0).scalar_type(), kBf16);
  EXPECT_EQ(at::relu(x.to(kBf16)).scalar_type(), kFp32);
  EXPECT_EQ(at::matmul(x, x).scalar_type(), kBf16) << "a row of its own";
}

TEST(AutocastPolicies, EditsOfBatchNormLeaveTheFusedOneInItsInputsDtype) {
  nn::FusedBatchNorm fused(3);
  const at::Tensor x = torch::randn({4, 3, 5});
  for (const bool training : {true, false}) {
    fused->train(training);
    {
      const Autocast region(CastPolicy::semitone({kCpu, kBf16}).keep_fp32("batch_norm"));
      EXPECT_EQ(fused(x.to(kBf16)).scalar_type(), kBf16);
    }
    const Autocast region(CastPolicy::semitone({kCpu, kBf16}).lower("batch_norm"));
    EXPECT_EQ(fused(x).scalar_type(), kFp32);
  }
}

// They are written to, although the operators' schemas do not say so.
TEST(AutocastPolicies, EditsLeaveRunningStatisticsInTheirMemory) {
  torch::manual_seed(3);
  const at::Tensor x = torch::randn({4, 3, 5}) + 2;
  const auto train = [&x](c10::ScalarType layer, const std::optional<CastPolicy>& policy) {
    torch::nn::BatchNorm1d batch(3);
    torch::nn::InstanceNorm1d instance(
        torch::nn::InstanceNorm1dOptions(3).affine(true).track_running_stats(true));
    batch->to(layer);
    instance->to(layer);
    std::optional<Autocast> region;
    if (policy.has_value()) region.emplace(*policy);
    const at::Tensor input = x.to(layer);
    EXPECT_TRUE(batch(input).isfinite().all().item<bool>());
    EXPECT_TRUE(instance(input).isfinite().all().item<bool>());
    return at::cat({batch->running_mean, batch->running_var, instance->running_mean,
                    instance->running_var})
        .to(kFp32);
  };
  const auto edited = [](const char* op) {
    return std::vector<CastPolicy>{CastPolicy::semitone({kCpu, kBf16}).lower(op),
                                   CastPolicy::semitone({kCpu, kBf16}).keep_fp32(op),
                                   CastPolicy::semitone({kCpu, kBf16}).widest(op)};
  };
  const at::Tensor want = train(kFp32, std::nullopt);
  for (const char* const op : {"batch_norm", "instance_norm"}) {
    for (const CastPolicy& policy : edited(op)) {
      for (const auto layer : {kFp32, kBf16})
        EXPECT_TRUE(torch::allclose(train(layer, policy), want, 0.02, 0.02)) << op << layer;
    }
  }
}

TEST(AutocastPolicies, KeptParametersKeepTheirOperatorsInFp32) {
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  const auto policy = CastPolicy::semitone({kCpu, kBf16}).keep_fp32_params("1.*").bind(net);
  for (const auto& x : {torch::rand({2, 4}), torch::rand({2, 3, 4})}) {
    at::Tensor first;
    at::Tensor second;
    {
      const Autocast region(policy);
      first = net[0]->as<torch::nn::Linear>()->forward(x);
      second = net[1]->as<torch::nn::Linear>()->forward(first);
    }
    EXPECT_EQ(first.scalar_type(), kBf16);
    EXPECT_EQ(second.scalar_type(), kFp32);
    expect_close(second, net[1]->as<torch::nn::Linear>()->forward(first.to(kFp32)),
                 test::reduction_tolerance(kFp32, 4));
  }
}

// An operator that writes to an argument cannot be cast: it would write to the copy.
TEST(AutocastPolicies, KeptParametersLeaveOperatorsAloneThatWriteToAnArgument) {
  torch::nn::Linear linear(2, 2);
  {
    const torch::NoGradGuard no_grad;
    linear->bias.fill_(3);
  }
  const auto low = [](double value) { return torch::full({2}, value, kFp16); };
  const auto apex = CastPolicy::apex({kCpu, kFp16}).keep_fp32_params("bias");
  const torch::NoGradGuard no_grad;
  {
    const Autocast region(CastPolicy(apex).leave("pow_").bind(linear));
    auto x = low(2);
    x.pow_(linear->bias);
    expect_bitwise_equal(x, low(8));
    auto y = low(2);
    y.add_(linear->bias);
    expect_bitwise_equal(y, low(5));
    auto out = low(0);
    at::mul_out(out, low(2), linear->bias);
    expect_bitwise_equal(out, low(6));
  }
  const Autocast region(apex.bind(linear));
  auto x = low(2);
  expect_error([&] { x.pow_(linear->bias); }, {"'pow_.Tensor'", "'apex'"});
  expect_bitwise_equal(x, low(2));
}

struct KeptCase {
  const char* name;
  at::Tensor (*run)(const at::Tensor& weight, const at::Tensor& x);  // x: 16 bits, 4x4 as weight
};

const std::vector<KeptCase>& kept_cases() {
  static const std::vector<KeptCase> cases{
      {"mm", [](const at::Tensor& w, const at::Tensor& x) { return at::mm(w, x); }},
      {"mv", [](const at::Tensor& w, const at::Tensor& x) { return at::mv(w, x[0]); }},
      {"matmul", [](const at::Tensor& w, const at::Tensor& x) { return at::matmul(x, w.t()); }},
      {"linear", [](const at::Tensor& w, const at::Tensor& x) { return at::linear(x, w); }},
      {"addr", [](const at::Tensor& w, const at::Tensor& x) { return at::addr(w, x[0], x[1]); }},
      {"dot", [](const at::Tensor& w, const at::Tensor& x) { return at::dot(w[0], x[0]); }},
      {"einsum",
       [](const at::Tensor& w, const at::Tensor& x) { return at::einsum("ij,jk->ik", {x, w}); }},
      {"prelu", [](const at::Tensor& w, const at::Tensor& x) { return at::prelu(x, w[0]); }},
      {"cat", [](const at::Tensor& w, const at::Tensor& x) { return at::cat({x, w}); }},
      {"layer_norm",
       [](const at::Tensor& w, const at::Tensor& x) { return at::layer_norm(x, {4}, w[0]); }},
      {"relu", [](const at::Tensor& w, const at::Tensor&) { return at::relu(w); }},
      {"mul", [](const at::Tensor& w, const at::Tensor& x) { return w * x; }}};
  return cases;
}

class KeptParameters : public testing::TestWithParam<std::string> {};

// Also if the policy's own table does not list the operator, and for any policies that this process
// has used: in the test amp_test.first_use.presets each preset is the first of a process.
TEST_P(KeptParameters, KeepEveryCastOperatorInFp32) {
  torch::nn::Linear linear(torch::nn::LinearOptions(4, 4).bias(false));
  const auto x = torch::rand({4, 4}).to(kBf16);
  const auto policy = CastPolicy::by_name(GetParam(), {kCpu, kBf16}).keep_fp32_params("weight");
  const torch::NoGradGuard no_grad;
  const Autocast region(policy.bind(linear));
  for (const KeptCase& one : kept_cases()) {
    SCOPED_TRACE(one.name);
    const at::Tensor got = one.run(linear->weight, x);
    EXPECT_EQ(got.scalar_type(), kFp32);
    const DisableCasts no_casts;
    expect_close(got, one.run(linear->weight, x.to(kFp32)), test::reduction_tolerance(kFp32, 4));
  }
}

INSTANTIATE_TEST_SUITE_P(AutocastPolicies, KeptParameters,
                         testing::ValuesIn(CastPolicy::preset_names()), [](const auto& tested) {
                           std::string name = tested.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// An operator that neither the policy nor preset semitone lists is not cast, even if another policy
// has installed a kernel for it.
TEST(AutocastPolicies, KeptParametersDoNotCastWhatNoListNames) {
  torch::nn::Linear linear(torch::nn::LinearOptions(4, 4).bias(false));
  const auto x = torch::rand({4, 4}).to(kBf16);
  const auto policy = CastPolicy::none({kCpu, kBf16}).keep_fp32_params("weight").bind(linear);
  const torch::NoGradGuard no_grad;
  const auto raises = [&] {
    const Autocast region(policy);
    EXPECT_THROW(at::lerp(linear->weight, x, 0.5), c10::Error);
  };
  raises();
  {
    const Autocast installs(CastPolicy::none({kCpu, kBf16}).keep_fp32("lerp"));
    EXPECT_EQ(at::lerp(linear->weight, x, 0.5).scalar_type(), kFp32);
  }
  raises();
  const Autocast region(
      CastPolicy::none({kCpu, kBf16}).leave("lerp").keep_fp32_params("weight").bind(linear));
  EXPECT_EQ(at::lerp(linear->weight, x, 0.5).scalar_type(), kFp32) << "a row of its own";
}

TEST(AutocastPolicies, KeptParametersWithoutAModelAreAnError) {
  const auto policy = CastPolicy::semitone({kCpu, kBf16}).keep_fp32_params("nosuch*");
  expect_error([&] { const Autocast region(policy); },
               {"[amp.autocast]", "'nosuch*'", "policy.bind(model)"});
  EXPECT_FALSE(autocast_enabled(kCpu));
}

TEST(AutocastPolicies, ParametersMayBeKeptAfterBind) {
  torch::nn::Linear linear(4, 4);
  auto policy = CastPolicy::semitone({kCpu, kBf16}).bind(linear);
  policy.keep_fp32_params("weight");
  const Autocast region(policy);
  EXPECT_EQ(linear(torch::rand({2, 4})).scalar_type(), kFp32);
}

struct Promotion {
  c10::ScalarType a;
  c10::ScalarType b;
  c10::ScalarType promote;  // in a bf16 region
  c10::ScalarType widest;
};

const std::vector<Promotion> kPromotions{
    {kFp32, kFp32, kFp32, kFp32},
    {kFp32, kBf16, kFp32, kFp32},
    {kFp32, kFp16, kFp32, kFp32},
    {kBf16, kBf16, kBf16, kBf16},
    {kBf16, kFp16, kFp32, kFp32},
    // fp16 alone meets the region's bf16 in promote, and nothing else in widest.
    {kFp16, kFp16, kFp32, kFp16}};

TEST(AutocastPromotion, GoesToTheWidestDtype) {
  const auto x = torch::rand({4}) + 0.5;
  const auto base = CastPolicy::none({kCpu, kBf16});
  const auto promote =
      CastPolicy(base).promote("atan2").promote("cat").promote("dot").promote("addcmul");
  const auto widest =
      CastPolicy(base).widest("atan2").widest("cat").widest("dot").widest("addcmul");
  for (const Promotion& one : kPromotions) {
    for (const auto& [first, second] : {std::pair{one.a, one.b}, std::pair{one.b, one.a}}) {
      SCOPED_TRACE(dtype_name(first) + " with " + dtype_name(second));
      const auto a = x.to(first);
      const auto b = x.to(second);
      for (const auto& [policy, want] :
           {std::pair{&promote, one.promote}, std::pair{&widest, one.widest}}) {
        const Autocast region(*policy);
        EXPECT_EQ(at::atan2(a, b).scalar_type(), want);
        EXPECT_EQ(at::cat({a, b, a}).scalar_type(), want);
        EXPECT_EQ(at::dot(a, b).scalar_type(), want);
        EXPECT_EQ(at::addcmul(a, b, b).scalar_type(), want);
      }
    }
  }
}

TEST(AutocastPromotion, CopiesTheListOfACaller) {
  const Autocast region(CastPolicy::semitone({kCpu, kBf16}));
  const std::vector<at::Tensor> tensors{torch::ones({2}), torch::ones({2}, kBf16)};
  EXPECT_EQ(at::cat(tensors).scalar_type(), kFp32);
  EXPECT_EQ(at::stack(tensors).scalar_type(), kFp32);
  EXPECT_EQ(tensors[1].scalar_type(), kBf16);
}

TEST(AutocastPromotion, MixedArgumentsThatLibTorchsCpuListRefusesWorkInPresetSemitone) {
  const auto x = torch::rand({4, 4});
  const auto low = x.to(kBf16);
  const Autocast region(CastPolicy::semitone({kCpu, kBf16}));
  EXPECT_EQ(at::mv(low, x[0]).scalar_type(), kBf16);
  EXPECT_EQ(at::dot(low[0], x[0]).scalar_type(), kFp32);
  EXPECT_EQ(at::index_put(low, {torch::tensor({0})}, x[0]).scalar_type(), kFp32);
  EXPECT_EQ(at::scatter_add(low, 0, torch::zeros({4, 4}, torch::kLong), x).scalar_type(), kFp32);
  EXPECT_EQ(at::bilinear(low, x, x.view({1, 4, 4})).scalar_type(), kFp32);
}

// Preset torch behaves as LibTorch, also where LibTorch raises, for any other policies that this
// process has used.
TEST(AutocastPromotion, PresetTorchRaisesWhereLibTorchRaises) {
  const auto half = torch::ones({2}, kFp16);
  {
    const Autocast installs(CastPolicy::apex(kCpu));
  }
  const Autocast region(CastPolicy::torch({kCpu, kBf16}));
  EXPECT_THROW(at::cat({half, half}), c10::Error);
  EXPECT_EQ(at::cat({half.to(kBf16), torch::ones({2})}).scalar_type(), kFp32);
}

TEST(AutocastBan, RefusesA16BitArgumentAndSaysWhatToDo) {
  const auto p = torch::full({3}, 0.5);
  {
    const Autocast region(CastPolicy::apex({kCpu, kFp16}));
    expect_error([&] { (void)at::binary_cross_entropy(p.to(kFp16), p); },
                 {"[amp.autocast]", "'binary_cross_entropy'", "'apex'", "float16",
                  "policy.keep_fp32(\"binary_cross_entropy\")"});
    EXPECT_EQ(at::binary_cross_entropy(p, p).scalar_type(), kFp32) << "fp32 arguments pass";
  }
  // Apex's allow_banned.
  const Autocast region(CastPolicy::apex({kCpu, kFp16}).keep_fp32("binary_cross_entropy"));
  EXPECT_EQ(at::binary_cross_entropy(p.to(kFp16), p).scalar_type(), kFp32);
}

TEST(AutocastBan, OfAnInPlaceOperatorProposesAnEditThatIsPossible) {
  const Autocast region(CastPolicy::apex({kCpu, kFp16}));
  auto low = torch::ones({3}, kFp16);
  expect_error([&] { low.exp_(); }, {"'exp_'", "policy.leave(\"exp_\")"});
  EXPECT_EQ(low[0].item<float>(), 1) << "nothing was written";
  auto wide = torch::zeros({3});
  EXPECT_EQ(wide.exp_()[0].item<float>(), 1);
  const Autocast relaxed(CastPolicy::apex({kCpu, kFp16}).leave("exp_"));
  EXPECT_EQ(low.exp_().scalar_type(), kFp16);
}

TEST(PresetSemitone, ComputesInFp32WhatLibTorchsCpuCannotIn16Bits) {
  torch::manual_seed(3);
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const at::Tensor square =
        (torch::eye(4) * 2 + torch::rand({4, 4})).to(dtype);  // a positive determinant
    const at::Tensor wide = square.to(torch::kFloat);
    const auto results = [](const at::Tensor& x) {
      return std::vector<at::Tensor>{torch::logdet(x),
                                     torch::det(x),
                                     torch::matrix_exp(x),
                                     torch::linalg_pinv(x, 1e-6),
                                     torch::nuclear_norm(x),
                                     at::linalg_matrix_norm(x, 2., {-2, -1}),
                                     at::linalg_matrix_norm(x, "nuc", {-2, -1})};
    };
    const auto want = results(wide);
    const Autocast region(torch::kCPU, dtype);
    const auto got = results(square);
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(got[i].scalar_type(), torch::kFloat) << i;
      // Factorisations may differ with the alignment of their memory.
      EXPECT_TRUE(torch::allclose(got[i], want[i], 1e-4, 1e-4)) << i << got[i] << want[i];
    }
  }
}

}  // namespace
}  // namespace semitone::amp::autocast_test
