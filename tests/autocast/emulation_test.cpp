// Emulated 16-bit matrix products: the definition, bit for bit, and the exceptions.

#include "src/autocast/emulation.h"

#include "semitone/autocast/autocast.h"
#include "semitone/autocast/functions.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "src/autocast/regions.h"
#include "src/core/native_kernels.h"
#include "tests/support/casts.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::amp::emulation_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;

constexpr auto kCpu = torch::kCPU;
constexpr auto kFp32 = torch::kFloat;
constexpr auto kFp16 = torch::kHalf;
constexpr auto kBf16 = torch::kBFloat16;

using Tensors = std::vector<at::Tensor>;

CastPolicy semitone(c10::ScalarType dtype, Emulation emulation = Emulation::always) {
  return CastPolicy::semitone({kCpu, dtype}).emulation(emulation);
}
CastPolicy none(c10::ScalarType dtype, Emulation emulation = Emulation::always) {
  return CastPolicy::none({kCpu, dtype}).emulation(emulation);
}

at::Tensor rounded(const at::Tensor& tensor, c10::ScalarType dtype) {
  return tensor.detach().to(dtype).to(kFp32);
}

// ---- the definition ----------------------------------------------------------------------------

// An operator is emulated through fp32 if a row of the policy lowers it or, under any policy, if
// its arguments are 16-bit.
struct Product {
  const char* name;
  std::vector<std::vector<std::int64_t>> shapes;
  Tensors (*run)(const Tensors& t);
  bool lowered = true;  // by preset semitone
  bool single = true;  // one product: no sums that are rounded in between if its parts are emulated
  OperatorKind kind = OperatorKind::product;
  bool small_steps = false;  // of a recurrent network: never native
};

template <typename... Results>
Tensors listed(const std::tuple<Results...>& results) {
  return std::apply([](const auto&... tensors) { return Tensors{tensors...}; }, results);
}

const std::vector<Product>& products() {
  static const std::vector<Product> all{
      {"mm", {{3, 5}, {5, 4}}, [](const Tensors& t) { return Tensors{at::mm(t[0], t[1])}; }},
      {"addmm",
       {{4}, {3, 5}, {5, 4}},
       [](const Tensors& t) { return Tensors{at::addmm(t[0], t[1], t[2], 0.5, 2)}; }},
      {"bmm",
       {{2, 3, 5}, {2, 5, 4}},
       [](const Tensors& t) { return Tensors{at::bmm(t[0], t[1])}; }},
      {"baddbmm",
       {{2, 3, 4}, {2, 3, 5}, {2, 5, 4}},
       [](const Tensors& t) { return Tensors{at::baddbmm(t[0], t[1], t[2])}; }},
      {"addbmm",
       {{3, 4}, {2, 3, 5}, {2, 5, 4}},
       [](const Tensors& t) { return Tensors{at::addbmm(t[0], t[1], t[2])}; }},
      {"matmul",
       {{2, 3, 5}, {5, 4}},
       [](const Tensors& t) { return Tensors{at::matmul(t[0], t[1])}; }},
      {"mv", {{3, 5}, {5}}, [](const Tensors& t) { return Tensors{at::mv(t[0], t[1])}; }},
      {"addmv",
       {{3}, {3, 5}, {5}},
       [](const Tensors& t) { return Tensors{at::addmv(t[0], t[1], t[2])}; }},
      {"addr",
       {{3, 4}, {3}, {4}},
       [](const Tensors& t) { return Tensors{at::addr(t[0], t[1], t[2])}; }},
      {"dot",
       {{7}, {7}},
       [](const Tensors& t) { return Tensors{at::dot(t[0], t[1])}; },
       /*lowered=*/false},
      {"linear",
       {{3, 5}, {4, 5}, {4}},
       [](const Tensors& t) { return Tensors{at::linear(t[0], t[1], t[2])}; }},
      {"conv1d",
       {{2, 3, 9}, {4, 3, 3}, {4}},
       [](const Tensors& t) { return Tensors{at::conv1d(t[0], t[1], t[2], 2, 1)}; },
       /*lowered=*/true,
       /*single=*/true,
       OperatorKind::convolution},
      {"conv2d",
       {{2, 4, 7, 7}, {6, 2, 3, 3}, {6}},
       [](const Tensors& t) { return Tensors{at::conv2d(t[0], t[1], t[2], 1, 1, 1, 2)}; },
       /*lowered=*/true,
       /*single=*/true,
       OperatorKind::grouped_convolution},
      {"conv2d_padding",
       {{2, 3, 7, 7}, {4, 3, 3, 3}},
       [](const Tensors& t) { return Tensors{at::conv2d(t[0], t[1], {}, 1, "same")}; },
       /*lowered=*/true,
       /*single=*/true,
       OperatorKind::convolution},
      {"conv3d",
       {{1, 2, 5, 5, 5}, {3, 2, 3, 3, 3}, {3}},
       [](const Tensors& t) { return Tensors{at::conv3d(t[0], t[1], t[2])}; },
       /*lowered=*/true,
       /*single=*/true,
       OperatorKind::convolution},
      {"conv_transpose1d",
       {{2, 3, 6}, {3, 4, 3}, {4}},
       [](const Tensors& t) { return Tensors{at::conv_transpose1d(t[0], t[1], t[2], 2)}; },
       /*lowered=*/true,
       /*single=*/true,
       OperatorKind::transposed_convolution},
      {"conv_transpose2d",
       {{2, 3, 5, 5}, {3, 4, 3, 3}, {4}},
       [](const Tensors& t) { return Tensors{at::conv_transpose2d(t[0], t[1], t[2])}; },
       /*lowered=*/true,
       /*single=*/true,
       OperatorKind::transposed_convolution},
      {"conv_transpose3d",
       {{1, 2, 3, 3, 3}, {2, 3, 2, 2, 2}, {3}},
       [](const Tensors& t) { return Tensors{at::conv_transpose3d(t[0], t[1], t[2])}; },
       /*lowered=*/true,
       /*single=*/true,
       OperatorKind::transposed_convolution},
      {"einsum",
       {{3, 5}, {5, 4}},
       [](const Tensors& t) { return Tensors{at::einsum("ij,jk->ik", {t[0], t[1]})}; }},
      {"einsum_of_three",
       {{3, 5}, {5, 4}, {4, 2}},
       [](const Tensors& t) { return Tensors{at::einsum("ij,jk,kl->il", {t[0], t[1], t[2]})}; },
       /*lowered=*/true,
       /*single=*/false},
      {"multi_dot",
       {{3, 5}, {5, 4}, {4, 2}},
       [](const Tensors& t) { return Tensors{at::linalg_multi_dot(t)}; },
       /*lowered=*/true,
       /*single=*/false},
      {"attention",
       {{1, 2, 6, 4}, {1, 2, 6, 4}, {1, 2, 6, 4}},
       [](const Tensors& t) { return Tensors{at::scaled_dot_product_attention(t[0], t[1], t[2])}; },
       /*lowered=*/true,
       /*single=*/true,
       OperatorKind::attention},
      {"lstm",
       {{5, 2, 3}, {1, 2, 4}, {1, 2, 4}, {16, 3}, {16, 4}, {16}, {16}},
       [](const Tensors& t) {
         return listed(at::lstm(t[0], {t[1], t[2]}, {t[3], t[4], t[5], t[6]}, true, 1, 0, true,
                                false, false));
       },
       /*lowered=*/true,
       /*single=*/false,
       OperatorKind::recurrent},
      {"gru",
       {{5, 2, 3}, {1, 2, 4}, {12, 3}, {12, 4}, {12}, {12}},
       [](const Tensors& t) {
         return listed(
             at::gru(t[0], t[1], {t[2], t[3], t[4], t[5]}, true, 1, 0, true, false, false));
       },
       /*lowered=*/true,
       /*single=*/false,
       OperatorKind::product,
       /*small_steps=*/true},
      {"lstm_cell",
       {{2, 3}, {2, 4}, {2, 4}, {16, 3}, {16, 4}, {16}, {16}},
       [](const Tensors& t) {
         return listed(at::lstm_cell(t[0], {t[1], t[2]}, t[3], t[4], t[5], t[6]));
       },
       /*lowered=*/true,
       /*single=*/false,
       OperatorKind::product,
       /*small_steps=*/true}};
  return all;
}

struct Results {
  Tensors outputs;
  Tensors gradients;
};

void back_propagate(Results& results, const Tensors& leaves, const Tensors& gradients) {
  torch::autograd::backward(results.outputs, gradients);
  for (const at::Tensor& leaf : leaves) results.gradients.push_back(leaf.grad());
}

// Inputs rounded, fp32 forward and backward, every result rounded once.
Results by_definition(const Product& product, const Tensors& inputs, const Tensors& gradients,
                      c10::ScalarType dtype) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(rounded(input, dtype).requires_grad_());
  Tensors wide_gradients;
  for (const at::Tensor& gradient : gradients) wide_gradients.push_back(gradient.to(kFp32));
  Results results{product.run(leaves), {}};
  back_propagate(results, leaves, wide_gradients);
  for (at::Tensor& output : results.outputs) output = output.detach().to(dtype);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    results.gradients[i] = results.gradients[i].to(dtype).to(inputs[i].scalar_type());
  return results;
}

// A region of a policy; another processor decides which kernels Emulation uses.
class Region {
 public:
  explicit Region(const CastPolicy& policy, std::optional<InstructionSet> processor = {})
      : region_(policy) {
    if (processor.has_value()) other_.emplace(kAutocastState, on(*processor));
  }

 private:
  static std::shared_ptr<Regions> on(InstructionSet processor) {
    auto regions = std::make_shared<Regions>(*Regions::current());
    for (Regions::Region& region : regions->innermost) {
      auto policy = std::make_shared<CompiledPolicy>(*region.policy);
      policy->set_native(native_kernels(processor, kFp16), native_kernels(processor, kBf16));
      region.policy = std::move(policy);
    }
    return regions;
  }

  Autocast region_;
  std::optional<c10::DebugInfoGuard> other_;
};

Results in_region(const CastPolicy& policy, const Product& product, const Tensors& inputs,
                  const Tensors& gradients, std::optional<InstructionSet> processor = {}) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().clone().requires_grad_());
  Results results;
  {
    const Region region(policy, processor);
    results.outputs = product.run(leaves);
  }
  back_propagate(results, leaves, gradients);
  return results;
}

class EmulatedProducts : public testing::TestWithParam<std::tuple<std::size_t, c10::ScalarType>> {
 protected:
  EmulatedProducts() {
    torch::manual_seed(11);
    for (const auto& shape : product.shapes) inputs.push_back(torch::randn(shape));
    for (const at::Tensor& output : product.run(inputs))
      gradients.push_back(torch::randn(output.sizes()).to(dtype));
  }

  void expect_definition(const CastPolicy& policy, const Tensors& given) const {
    const Results want = by_definition(product, given, gradients, dtype);
    const Results got = in_region(policy, product, given, gradients);
    ASSERT_EQ(got.outputs.size(), want.outputs.size());
    for (std::size_t i = 0; i < want.outputs.size(); ++i) {
      SCOPED_TRACE("output " + std::to_string(i));
      expect_bitwise_equal(got.outputs[i], want.outputs[i]);
    }
    for (std::size_t i = 0; i < want.gradients.size(); ++i) {
      SCOPED_TRACE("gradient " + std::to_string(i));
      expect_bitwise_equal(got.gradients[i], want.gradients[i]);
    }
  }

  // As the same product with this Emulation, bit for bit.
  void expect_same(const Results& got, Emulation like) const {
    const auto want = in_region(semitone(dtype, like), product, low(), gradients);
    for (std::size_t i = 0; i < want.outputs.size(); ++i)
      expect_bitwise_equal(got.outputs[i], want.outputs[i]);
    for (std::size_t i = 0; i < want.gradients.size(); ++i)
      expect_bitwise_equal(got.gradients[i], want.gradients[i]);
  }

  Tensors low() const {
    Tensors cast;
    for (const at::Tensor& input : inputs) cast.push_back(input.to(dtype));
    return cast;
  }

  const Product& product = products()[std::get<0>(GetParam())];
  c10::ScalarType dtype = std::get<1>(GetParam());
  Tensors inputs;
  Tensors gradients;  // of the outputs, 16 bits
};

TEST_P(EmulatedProducts, AreTheDefinitionBitForBitForwardAndBackward) {
  if (product.lowered) expect_definition(semitone(dtype), inputs);
  expect_definition(semitone(dtype), low());
  if (product.single) expect_definition(none(dtype), low());
}

TEST_P(EmulatedProducts, AutomaticIsEmulatedWhereTheMachineLacksTheKernelsOnly) {
  const auto automatic =
      in_region(semitone(dtype, Emulation::automatic), product, low(), gradients);
  const bool native = trains_natively(kCpu, dtype, product.kind) && !product.small_steps;
  expect_same(automatic, native ? Emulation::never : Emulation::always);
}

// The decision for processors that this machine may not be: oneDNN and LibTorch compute the native
// calls with the existing instructions.
TEST_P(EmulatedProducts, AutomaticFollowsTheKernelsOfTheProcessor) {
  for (const auto set : {InstructionSet::avx2, InstructionSet::avx512_bf16, InstructionSet::amx,
                         InstructionSet::amx_fp16}) {
    SCOPED_TRACE(name_of(set));
    const auto got = in_region(semitone(dtype), product, low(), gradients, set);
    const bool native = native_kernels(set, dtype).trains(product.kind) && !product.small_steps;
    expect_same(got, native ? Emulation::never : Emulation::always);
  }
}

TEST_P(EmulatedProducts, NeverLeavesThemToLibTorch) {
  const Tensors got = in_region(none(dtype, Emulation::never), product, low(), gradients).outputs;
  const Tensors stock = product.run(low());
  for (std::size_t i = 0; i < stock.size(); ++i) expect_bitwise_equal(got[i].detach(), stock[i]);
}

INSTANTIATE_TEST_SUITE_P(Emulation, EmulatedProducts,
                         testing::Combine(testing::Range(std::size_t{0}, products().size()),
                                          testing::Values(kFp16, kBf16)),
                         [](const auto& tested) {
                           return std::string(products()[std::get<0>(tested.param)].name) + "_" +
                                  dtype_name(std::get<1>(tested.param));
                         });

// ---- kinds and passes -------------------------------------------------------------------------

// A call in fp16, and whether it runs in LibTorch's own fp16 on two processors that have some of
// its kernels: Sapphire Rapids (AVX512-FP16 and AMX, no gradient of a convolution's weights), and
// Granite Rapids (AMX-FP16).
struct Fp16Call {
  const char* name;
  at::Tensor (*run)(const Tensors& t);
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<bool> recorded;  // which of the tensors want a gradient
  bool on_sapphire_rapids;
  bool on_granite_rapids;
};

at::Tensor plain_conv2d(const Tensors& t) {
  return at::conv2d(t[0], t[1], t.size() > 2 ? t[2] : at::Tensor(), 1, 1);
}
at::Tensor dilated_conv2d(const Tensors& t) {
  return at::conv2d(t[0], t[1], {}, 1, 2, 2);
}
at::Tensor general_convolution(const Tensors& t) {
  return at::convolution(t[0], t[1], {}, {1, 1}, {1, 1}, {1, 1}, false, {0, 0}, 1);
}

at::Tensor gru_cell(const Tensors& t) {
  return at::gru_cell(t[0], t[1], t[2], t[3]);
}
at::Tensor packed_gru(const Tensors& t) {
  const auto sizes = torch::tensor({3, 2}, torch::kLong);
  return std::get<0>(at::gru(t[0], sizes, t[1], {t[2], t[3], t[4], t[5]}, true, 1, 0, true, false));
}

const std::vector<Fp16Call>& fp16_calls() {
  static const std::vector<std::vector<std::int64_t>> image{{2, 4, 7, 7}, {6, 4, 3, 3}, {6}};
  static const std::vector<std::vector<std::int64_t>> no_bias{{2, 4, 7, 7}, {6, 4, 3, 3}};
  static const std::vector<Fp16Call> all{
      {"conv2d, nothing recorded", plain_conv2d, image, {false, false, false}, true, true},
      {"conv2d, its input's gradient", plain_conv2d, image, {true, false, false}, true, true},
      {"conv2d, its weight's gradient", plain_conv2d, image, {false, true, false}, false, true},
      {"conv2d, its bias's gradient", plain_conv2d, image, {false, false, true}, false, true},
      {"conv2d, all gradients", plain_conv2d, image, {true, true, true}, false, true},
      {"convolution, nothing recorded", general_convolution, no_bias, {false, false}, true, true},
      {"convolution, recorded", general_convolution, no_bias, {true, true}, false, true},
      {"conv2d with padding 'same'",
       [](const Tensors& t) { return at::conv2d(t[0], t[1], {}, 1, "same"); },
       no_bias,
       {true, true},
       false,
       true},
      {"conv1d",
       [](const Tensors& t) { return at::conv1d(t[0], t[1], {}, 2, 1); },
       {{2, 4, 9}, {6, 4, 3}},
       {true, true},
       false,
       true},
      {"conv3d",
       [](const Tensors& t) { return at::conv3d(t[0], t[1]); },
       {{1, 2, 4, 4, 4}, {3, 2, 2, 2, 2}},
       {true, true},
       false,
       true},
      // AMX-FP16's kernel for the gradient of weights refuses these two.
      {"a dilated conv2d", dilated_conv2d, no_bias, {true, true}, false, false},
      {"a dilated conv2d, nothing recorded", dilated_conv2d, no_bias, {false, false}, true, true},
      {"conv2d, padded by more than half a kernel",
       [](const Tensors& t) { return at::conv2d(t[0], t[1], {}, 1, 2); },
       no_bias,
       {true, true},
       false,
       false},
      {"a depthwise conv2d",
       [](const Tensors& t) { return at::conv2d(t[0], t[1], {}, 1, 1, 1, 4); },
       {{2, 4, 7, 7}, {4, 1, 3, 3}},
       {false, false},
       false,
       false},
      {"a grouped convolution",
       [](const Tensors& t) {
         return at::convolution(t[0], t[1], {}, {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 2);
       },
       {{2, 4, 7, 7}, {6, 2, 3, 3}},
       {true, true},
       false,
       false},
      {"conv_transpose2d",
       [](const Tensors& t) { return at::conv_transpose2d(t[0], t[1]); },
       {{2, 4, 5, 5}, {4, 6, 3, 3}},
       {false, false},
       false,
       false},
      {"a transposed convolution",
       [](const Tensors& t) {
         return at::convolution(t[0], t[1], {}, {1, 1}, {0, 0}, {1, 1}, true, {0, 0}, 1);
       },
       {{2, 4, 5, 5}, {4, 6, 3, 3}},
       {true, true},
       false,
       false},
      {"mm",
       [](const Tensors& t) { return at::mm(t[0], t[1]); },
       {{3, 5}, {5, 4}},
       {true, true},
       true,
       true},
      {"a small gru_cell",
       gru_cell,
       {{2, 3}, {2, 4}, {12, 3}, {12, 4}},
       {true, true, true, true},
       false,
       false},
      {"a gru_cell",
       gru_cell,
       {{2, 3}, {2, 128}, {384, 3}, {384, 128}},
       {true, true, true, true},
       true,
       true},
      {"a small packed GRU",
       packed_gru,
       {{5, 3}, {1, 3, 4}, {12, 3}, {12, 4}, {12}, {12}},
       {true, true, true, true, true, true},
       false,
       false},
      {"a packed GRU",
       packed_gru,
       {{5, 3}, {1, 3, 128}, {384, 3}, {384, 128}, {384}, {384}},
       {true, true, true, true, true, true},
       true,
       true},
      {"attention",
       [](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2]); },
       {{1, 2, 6, 4}, {1, 2, 6, 4}, {1, 2, 6, 4}},
       {false, false, false},
       false,
       false},
      {"lstm",
       [](const Tensors& t) {
         return std::get<0>(at::lstm(t[0], {t[1], t[2]}, {t[3], t[4], t[5], t[6]}, true, 1, 0, true,
                                     false, false));
       },
       {{5, 2, 3}, {1, 2, 4}, {1, 2, 4}, {16, 3}, {16, 4}, {16}, {16}},
       {true, true, true, true, true, true, true},
       false,
       false},
  };
  return all;
}

TEST(Fp16Kernels, AreUsedForWhatACallComputes) {
  torch::manual_seed(14);
  for (const Fp16Call& call : fp16_calls()) {
    SCOPED_TRACE(call.name);
    const auto is_native = [&](InstructionSet processor) {
      Tensors inputs;
      for (std::size_t i = 0; i < call.shapes.size(); ++i)
        inputs.push_back(torch::randn(call.shapes[i]).to(kFp16).requires_grad_(call.recorded[i]));
      // Emulated calls convert their 16-bit arguments to fp32, and report it.
      const test::CastRecording casts;
      const Region region(semitone(kFp16, Emulation::automatic), processor);
      EXPECT_EQ(call.run(inputs).scalar_type(), kFp16);
      return casts->heard().empty();
    };
    EXPECT_EQ(is_native(InstructionSet::avx512_fp16), call.on_sapphire_rapids);
    EXPECT_EQ(is_native(InstructionSet::amx), call.on_sapphire_rapids);
    EXPECT_EQ(is_native(InstructionSet::amx_fp16), call.on_granite_rapids);
    EXPECT_FALSE(is_native(InstructionSet::avx512_bf16));
    const at::NoGradGuard no_grad;
    const bool has_forward = call.on_granite_rapids ||
                             std::string(call.name).starts_with("a dil") ||
                             std::string(call.name).ends_with("half a kernel");
    EXPECT_EQ(is_native(InstructionSet::amx), has_forward) << "no_grad";
  }
}

// What preset torch lowers inside of an LSTM that it does not list: oneDNN has no fp16 LSTM that
// trains, and raises.
TEST(Fp16Kernels, AnLstmTrainsUnderPresetTorchToo) {
  const auto policy = CastPolicy::torch({kCpu, kFp16});
  torch::nn::LSTM lstm(4, 6);
  const auto x = torch::randn({5, 3, 4}).requires_grad_();
  const Region region(policy, InstructionSet::amx);
  const auto output = std::get<0>(lstm(x));
  output.to(kFp32).sum().backward();
  EXPECT_TRUE(x.grad().abs().sum().item<double>() > 0);
}

// ---- all kinds of arguments --------------------------------------------------------------------

class EmulatedArguments : public testing::TestWithParam<c10::ScalarType> {
 protected:
  EmulatedArguments() { torch::manual_seed(12); }

  at::Tensor product(const at::Tensor& a, const at::Tensor& b) const {
    const Autocast region(semitone(GetParam()));
    return at::mm(a, b);
  }
  // mm of a and b by the definition.
  at::Tensor defined(const at::Tensor& a, const at::Tensor& b) const {
    return at::mm(rounded(a, GetParam()), rounded(b, GetParam())).to(GetParam());
  }
};

TEST_P(EmulatedArguments, OverflowUnderflowAndPassNanOnAsTheDtypeDoes) {
  const auto limits = dtype_limits(GetParam());
  const auto ones = torch::ones({1, 1});
  const auto largest = torch::full({1, 1}, limits.max);
  expect_bitwise_equal(product(largest, ones), largest.to(GetParam()));
  const auto too_large = product(torch::full({1, 2}, limits.max), torch::ones({2, 1}));
  EXPECT_EQ(too_large.item<double>(), std::numeric_limits<double>::infinity());
  EXPECT_TRUE(product(ones * NAN, ones).isnan().item<bool>());
  for (const double value : {1e-3, 6e-5, 3e-6, 6e-8, 2e-8, 1e-39, 1e-41}) {
    SCOPED_TRACE(value);
    const auto small = torch::full({1, 1}, value);
    expect_bitwise_equal(product(small, ones), small.to(GetParam()));
  }
}

// The sum is rounded, not its terms: 2048 + 1 + 1 is 2048 if each sum is rounded to fp16.
TEST_P(EmulatedArguments, AccumulateInFp32) {
  const double step = 2 / dtype_limits(GetParam()).epsilon;  // whose successor is step + 2
  const auto a = torch::tensor({step, 1.0, 1.0}, kFp32).view({1, 3});
  EXPECT_EQ(product(a, torch::ones({3, 1})).item<double>(), step + 2);
}

TEST_P(EmulatedArguments, MayHaveDifferentDtypes) {
  const auto a = torch::randn({3, 4});
  const auto b = torch::randn({4, 5});
  for (const auto first : {kFp32, kFp16, kBf16}) {
    for (const auto second : {kFp32, kFp16, kBf16})
      expect_bitwise_equal(product(a.to(first), b.to(second)), defined(a.to(first), b.to(second)));
  }
}

TEST_P(EmulatedArguments, InDoubleAreLeftAlone) {
  const auto a = torch::randn({3, 4}, torch::kDouble);
  expect_bitwise_equal(product(a, a.t()), at::mm(a, a.t()));
  const Autocast region(none(GetParam()));
  EXPECT_THROW(at::mm(a.to(GetParam()), a.t()), c10::Error) << "mixed arguments raise as outside";
}

TEST_P(EmulatedArguments, MayBeEmpty) {
  const auto a = torch::randn({0, 4});
  const auto b = torch::randn({4, 5});
  expect_bitwise_equal(product(a, b), torch::empty({0, 5}, GetParam()));
  expect_bitwise_equal(product(b.slice(1, 0, 0), torch::randn({0, 3})),
                       torch::zeros({4, 3}, GetParam()));
  const Autocast region(semitone(GetParam()));
  expect_bitwise_equal(at::conv2d(torch::randn({0, 2, 5, 5}), torch::randn({3, 2, 3, 3})),
                       torch::empty({0, 3, 3, 3}, GetParam()));
}

TEST_P(EmulatedArguments, MayBeNonContiguous) {
  const auto a = torch::randn({8, 6});
  const auto b = torch::randn({6, 8});
  expect_bitwise_equal(product(b.t(), a.t()), defined(b.t(), a.t()));
  const auto wide = torch::randn({6, 16}).slice(1, 0, 16, 2);
  expect_bitwise_equal(product(a, wide), defined(a, wide));
  const auto expanded = torch::randn({6, 1}).expand({6, 8});
  expect_bitwise_equal(product(a, expanded), defined(a, expanded));

  const auto image = torch::randn({2, 4, 6, 6}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto weight = torch::randn({3, 4, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast);
  const Autocast region(semitone(GetParam()));
  const auto got = at::conv2d(image, weight);
  const DisableCasts no_casts;
  EXPECT_TRUE(got.is_contiguous(at::MemoryFormat::ChannelsLast));
  expect_bitwise_equal(
      got, at::conv2d(rounded(image, GetParam()), rounded(weight, GetParam())).to(GetParam()));
}

TEST_P(EmulatedArguments, InPlaceAndOutFormsAreLibTorchsOwn) {
  const auto a = torch::randn({4, 4}).to(GetParam());
  auto stock = torch::zeros({4, 4}, GetParam());
  at::mm_out(stock, a, a);
  auto got = torch::zeros({4, 4}, GetParam());
  const Autocast region(none(GetParam()));
  at::mm_out(got, a, a);
  expect_bitwise_equal(got, stock);
}

// ---- functions of one's own --------------------------------------------------------------------

// Two products, the second of a 16-bit result: each is rounded.
at::Tensor cube(const at::Tensor& x) {
  return at::mm(at::mm(x, x), x);
}

at::Tensor cube_by_definition(const at::Tensor& x, c10::ScalarType dtype) {
  const at::Tensor wide = rounded(x, dtype);
  return at::mm(rounded(at::mm(wide, wide), dtype), wide).to(dtype);
}

TEST_P(EmulatedArguments, OfAHalfFunctionAndItsBackward) {
  const auto x = torch::randn({5, 5});
  const auto leaf = x.clone().requires_grad_();
  const auto gradient = torch::randn({5, 5}).to(GetParam());
  at::Tensor got;
  {
    const Autocast region(semitone(GetParam()));
    got = half_function(cube)(leaf);
  }
  expect_bitwise_equal(got.detach(), cube_by_definition(x, GetParam()));
  got.backward(gradient);

  const auto low = x.to(GetParam()).requires_grad_();
  {
    const Autocast region(none(GetParam()));
    cube(low.clone()).backward(gradient);  // no leaf, as the cast: each product rounds a gradient
  }
  expect_bitwise_equal(leaf.grad(), low.grad().to(kFp32));
}

TEST_P(EmulatedArguments, OfFunctionsThatGet16BitTensors) {
  const auto x = torch::randn({5, 5}).to(GetParam());
  const auto want = cube_by_definition(x, GetParam());
  const Autocast region(semitone(GetParam()));
  expect_bitwise_equal(promote_function(cube)(x), want);
  const auto scope = AutocastState::current().without_casts().enter();
  expect_bitwise_equal(cube(x), want);
  EXPECT_EQ(cube(x.to(kFp32)).scalar_type(), kFp32) << "nothing is cast";
  EXPECT_FALSE(autocast_enabled(kCpu));
}

TEST_P(EmulatedArguments, FunctionsInsideFunctionsAreCalledAsTheyAre) {
  const auto dtype_of = [](const at::Tensor& x) { return x.scalar_type(); };
  const auto nested = float_function([&](const at::Tensor& x) {
    return std::pair(half_function(dtype_of)(x), promote_function(dtype_of)(x.to(GetParam())));
  });
  const Autocast region(semitone(GetParam()));
  EXPECT_EQ(nested(torch::ones({2})), std::pair(kFp32, GetParam()));
  EXPECT_TRUE(autocast_enabled(kCpu)) << "on again afterwards";
}

struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            c10::ScalarType dtype) {
    const CustomForward scope(ctx, dtype);
    const at::Tensor input = scope.cast(x);
    ctx->save_for_backward({input});
    return at::mm(input, input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const CustomBackward scope(ctx);
    const auto x = ctx->get_saved_variables()[0];
    return {at::mm(grads[0], x.t()), {}};
  }
};

TEST_P(EmulatedArguments, OfAnAutogradFunctionAndItsBackward) {
  const auto x = torch::randn({5, 5}).requires_grad_();
  const auto gradient = torch::randn({5, 5}).to(GetParam());
  at::Tensor got;
  {
    const Autocast region(semitone(GetParam()));
    got = Square::apply(x, GetParam());
  }
  expect_bitwise_equal(got.detach(), defined(x, x));
  got.backward(gradient);
  expect_bitwise_equal(x.grad(), defined(gradient, x.t()).to(kFp32));
}

// ---- training ----------------------------------------------------------------------------------

// Whole steps, with a loss scale, in the dtypes that they should have.
TEST_P(EmulatedArguments, AreEnoughToTrainAModel) {
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)), torch::nn::ReLU(),
                            torch::nn::Flatten(), torch::nn::Linear(4 * 36, 16), torch::nn::ReLU(),
                            torch::nn::Linear(16, 3));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto target = torch::arange(24).remainder(3);
  const auto x = torch::randn({24, 1, 8, 8}) + target.view({24, 1, 1, 1});
  double first = 0;
  double last = 0;
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const Autocast region(semitone(GetParam()));
      const auto scores = net->forward(x);
      EXPECT_EQ(scores.scalar_type(), GetParam());
      loss = at::cross_entropy_loss(scores, target);
    }
    EXPECT_EQ(loss.scalar_type(), kFp32);
    (loss * 256).backward();
    for (const auto& parameter : net->parameters()) {
      EXPECT_EQ(parameter.grad().scalar_type(), kFp32);
      parameter.mutable_grad().div_(256);
    }
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  EXPECT_LT(last, 0.2 * first);
}

// Weights in 16 bits, as at O3.
TEST_P(EmulatedArguments, AreEnoughToTrainA16BitModel) {
  torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
  net->to(GetParam());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const auto x = torch::randn({32, 8}).to(GetParam());
  const auto target = x.to(kFp32).sum(1, true).tanh();
  double first = 0;
  double last = 0;
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const Autocast region(none(GetParam()));
      loss = at::mse_loss(net->forward(x).to(kFp32), target);
    }
    loss.backward();
    for (const auto& parameter : net->parameters())
      EXPECT_EQ(parameter.grad().scalar_type(), GetParam());
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  EXPECT_LT(last, 0.3 * first);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, EmulatedArguments, testing::Values(kFp16, kBf16),
                         [](const auto& tested) { return dtype_name(tested.param); });

// ---- convolutions that LibTorch computes wrongly -----------------------------------------------

struct Convolution {
  std::int64_t channels;  // in a group
  std::int64_t width;     // of the kernel
  std::int64_t groups = 1;
};

const std::vector<Convolution> kSuspects{{8, 8},  {4, 16},  {2, 32},  {12, 8},
                                         {6, 16}, {14, 16}, {10, 32}, {8, 8, 2}};
const std::vector<Convolution> kOthers{{3, 16}, {16, 8}, {8, 4}, {7, 32}, {8, 3}, {32, 3}};

// Whole numbers that every dtype holds, and few of them: an exact result.
Tensors whole_numbers(const Convolution& shape, int dims) {
  const std::int64_t side = shape.width + 3;
  const auto channels = shape.channels * shape.groups;
  std::vector<std::int64_t> input{2, channels, side};
  std::vector<std::int64_t> weight{8 * shape.groups, shape.channels, shape.width};
  if (dims == 2) {
    input.insert(input.begin() + 2, 3);
    weight.insert(weight.begin() + 2, 2);
  }
  return {torch::randint(-1, 2, input, kFp32), torch::randint(-1, 2, weight, kFp32)};
}

at::Tensor convolve(const Tensors& t, std::int64_t groups) {
  const std::int64_t padding = 0;
  return t[0].dim() == 3 ? at::conv1d(t[0], t[1], {}, 1, padding, 1, groups)
                         : at::conv2d(t[0], t[1], {}, 1, padding, 1, groups);
}

class Convolutions : public testing::TestWithParam<std::tuple<c10::ScalarType, int>> {};

TEST_P(Convolutions, AreRightInARegion) {
  const auto [dtype, dims] = GetParam();
  torch::manual_seed(13);
  for (const auto* shapes : {&kSuspects, &kOthers}) {
    for (const Convolution& shape : *shapes) {
      SCOPED_TRACE(
          c10::str(shape.channels, " channels, width ", shape.width, ", groups ", shape.groups));
      const Tensors wide = whole_numbers(shape, dims);
      const Tensors low{wide[0].to(dtype), wide[1].to(dtype)};
      const at::Tensor want = convolve(wide, shape.groups).to(dtype);
      {
        const Autocast region(semitone(dtype, Emulation::automatic));
        expect_close(convolve(wide, shape.groups), want, test::rounding_tolerance(dtype));
      }
      {
        const Autocast region(none(dtype, Emulation::automatic));
        expect_close(convolve(low, shape.groups), want, test::rounding_tolerance(dtype));
      }
      const at::Tensor stock = convolve(low, shape.groups);
      {
        const Autocast region(none(dtype, Emulation::never));
        expect_bitwise_equal(convolve(low, shape.groups), stock);
      }
      const bool right = at::allclose(stock.to(kFp32), want.to(kFp32), /*rtol=*/0.01, /*atol=*/0.5);
      EXPECT_TRUE(right || convolves_wrongly(low[1], dtype));
      if (shapes == &kOthers) {
        EXPECT_FALSE(convolves_wrongly(low[1], dtype));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Emulation, Convolutions,
                         testing::Combine(testing::Values(kFp16, kBf16), testing::Values(1, 2)),
                         [](const auto& tested) {
                           return dtype_name(std::get<0>(tested.param)) + "_" +
                                  std::to_string(std::get<1>(tested.param)) + "d";
                         });

TEST(ConvolvesWrongly, AsksOnlyAbout16BitConvolutionsOnACpu) {
  EXPECT_FALSE(convolves_wrongly(torch::ones({8, 8}), kBf16)) << "no convolution's weight";
  EXPECT_FALSE(convolves_wrongly(torch::ones({8, 8, 8}), kFp32));
  EXPECT_FALSE(convolves_wrongly(torch::ones({8, 8, 8}, torch::kMeta), kBf16));
}

}  // namespace
}  // namespace semitone::amp::emulation_test
