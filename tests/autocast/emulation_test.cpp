// Emulated 16-bit products: the definition, bit for bit, for every kind of operator.

#include "src/autocast/emulation.h"

#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "src/core/native_kernels.h"
#include "tests/autocast/emulation_fixture.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace semitone::amp::emulation_test {
namespace {

using test::expect_bitwise_equal;

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

}  // namespace
}  // namespace semitone::amp::emulation_test
