// Convolutions that LibTorch computes wrongly, against fp64.

#include "src/autocast/convolution_faults.h"

#include "semitone/autocast/autocast.h"
#include "semitone/core/dtype.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::amp::convolution_faults_test {
namespace {

using Sizes = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;

struct Call {
  Sizes input;
  Sizes weight;
  Sizes stride;
  Sizes padding;
  Sizes dilation{1, 1};
  bool transposed = false;
  Sizes output_padding{0, 0};
  std::int64_t groups = 1;
};

at::Tensor convolve(const Call& call, const at::Tensor& input, const at::Tensor& weight,
                    const at::Tensor& bias) {
  if (call.transposed) {
    return at::conv_transpose2d(input, weight, bias, call.stride, call.padding, call.output_padding,
                                call.groups, call.dilation);
  }
  return at::conv2d(input, weight, bias, call.stride, call.padding, call.dilation, call.groups);
}

// Memory that is allocated next is not zero.
void leave_memory_behind() {
  Tensors all;
  for (const std::int64_t size : {16, 64, 256, 1024, 4096, 20'000, 100'000})
    all.push_back(torch::full({size}, 1e20F));
}

// The result and both gradients, in fp64.
Tensors results(const Call& call, const at::Tensor& input, const at::Tensor& weight,
                const at::Tensor& bias, std::optional<c10::ScalarType> dtype) {
  const auto own = dtype.has_value() ? at::kFloat : at::kDouble;
  const at::Tensor x = input.to(own).detach().requires_grad_();
  const at::Tensor w = weight.to(own).detach().requires_grad_();
  std::optional<Autocast> region;
  if (dtype.has_value()) region.emplace(at::kCPU, *dtype);
  // A bias decides which of oneDNN's kernels runs.
  const at::Tensor y = convolve(call, x, w, bias.to(own));
  region.reset();
  leave_memory_behind();
  Tensors all = torch::autograd::grad({y}, {x, w}, {torch::ones_like(y)});
  all.push_back(y);
  for (at::Tensor& tensor : all) tensor = tensor.detach().to(at::kDouble);
  return all;
}

// Small integers: all sums are exact, and results are rounded once.
void expect_right(const Call& call, c10::ScalarType dtype, at::MemoryFormat format) {
  SCOPED_TRACE(c10::str(dtype_name(dtype), " ", format, " ", call.input, " * ", call.weight,
                        " stride ", call.stride, " padding ", call.padding, " groups ", call.groups,
                        call.transposed ? " transposed" : ""));
  const auto integers = [&](const Sizes& sizes) {
    return torch::randint(-2, 3, sizes, at::kFloat).contiguous(format);
  };
  const at::Tensor input = integers(call.input);
  const at::Tensor weight = integers(call.weight);
  const std::int64_t channels =
      call.transposed ? call.weight[1] * call.groups : call.weight.front();
  const at::Tensor bias = torch::ones({channels});
  const Tensors want = results(call, input, weight, bias, std::nullopt);
  const Tensors got = results(call, input, weight, bias, dtype);
  for (std::size_t i = 0; i < want.size(); ++i)
    EXPECT_TRUE(test::near(got[i], want[i], test::rounding_tolerance(dtype))) << i;
}

const std::vector<Call>& suspects() {
  static const std::vector<Call> calls{
      {{8, 32, 1, 1}, {64, 32, 3, 3}, {2, 2}, {1, 1}},
      {{8, 32, 1, 1}, {64, 32, 5, 5}, {2, 2}, {2, 2}},
      {{3, 32, 1, 1}, {32, 32, 1, 5}, {1, 3}, {0, 2}},
      {{3, 32, 5, 2}, {17, 32, 5, 3}, {2, 3}, {0, 2}},
      {{5, 4, 4, 2}, {6, 2, 4, 3}, {1, 3}, {0, 2}, {1, 1}, false, {0, 0}, 2},
      {{2, 2, 28, 1}, {1, 2, 3, 1}, {2, 2}, {3, 1}, {1, 2}},
      {{5, 4, 7, 1}, {4, 16, 1, 3}, {2, 2}, {0, 1}, {1, 1}, true},
      {{3, 32, 28, 1}, {32, 1, 1, 3}, {1, 3}, {0, 1}, {1, 1}, true, {0, 0}, 8},
      // One channel in each group, and one result in each row.
      {{3, 3, 5, 2}, {48, 1, 4, 2}, {1, 2}, {0, 0}, {1, 1}, false, {0, 0}, 3},
      {{2, 3, 3, 3}, {48, 1, 3, 3}, {1, 3}, {2, 0}, {2, 1}, false, {0, 0}, 3},
      {{1, 16, 7, 1}, {16, 1, 4, 3}, {1, 3}, {0, 1}, {2, 1}, true, {0, 0}, 2},
      // Results of padding only.
      {{3, 10, 5, 1}, {10, 5, 5, 1}, {1, 2}, {3, 1}, {2, 2}, false, {0, 0}, 2},
  };
  return calls;
}

const std::vector<Call>& others() {
  static const std::vector<Call> calls{
      {{8, 32, 3, 3}, {64, 32, 3, 3}, {2, 2}, {1, 1}},
      {{8, 32, 1, 1}, {64, 32, 3, 3}, {1, 1}, {1, 1}},
      {{2, 8, 9, 9}, {8, 8, 3, 3}, {2, 2}, {0, 0}},
      {{2, 8, 9, 9}, {8, 4, 3, 3}, {2, 2}, {1, 1}, {1, 1}, true, {1, 1}},
  };
  return calls;
}

class ConvolutionGradients
    : public testing::TestWithParam<std::tuple<c10::ScalarType, at::MemoryFormat>> {
 protected:
  void TearDown() override { at::set_num_threads(threads_); }
  int threads_ = at::get_num_threads();
};

TEST_P(ConvolutionGradients, AreRightForShapesThatLibTorchComputesWrongly) {
  const auto [dtype, format] = GetParam();
  torch::manual_seed(3);
  for (const auto* calls : {&suspects(), &others()}) {
    for (const Call& call : *calls) {
      for (int attempt = 0; attempt < 3; ++attempt) expect_right(call, dtype, format);
    }
  }
}

// With three threads LibTorch's would write beyond their memory.
TEST_P(ConvolutionGradients, OfFewChannelsAreRightForStridesOver1x1Kernels) {
  const auto [dtype, format] = GetParam();
  torch::manual_seed(4);
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    for (const std::int64_t channels : {2, 3, 8, 15, 16}) {
      expect_right({{4, channels, 28, 28}, {16, channels, 1, 1}, {2, 2}, {0, 0}}, dtype, format);
      expect_right({{4, channels, 9, 5}, {16, channels, 1, 1}, {2, 1}, {0, 0}}, dtype, format);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Autocast, ConvolutionGradients,
    testing::Combine(testing::Values(at::kBFloat16, at::kHalf),
                     testing::Values(at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast)),
    [](const auto& tested) {
      const bool is_last = std::get<1>(tested.param) == at::MemoryFormat::ChannelsLast;
      return dtype_name(std::get<0>(tested.param)) + (is_last ? "_channels_last" : "_contiguous");
    });

bool is_suspect(const Call& call, bool recorded = true) {
  const std::string name = call.transposed ? "aten::conv_transpose2d" : "aten::conv2d";
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), call.transposed ? "input" : "");
  const at::Tensor input = torch::ones(call.input).requires_grad_(recorded);
  const at::Tensor weight = torch::ones(call.weight);
  std::vector<c10::IValue> arguments{input, weight, c10::IValue(), call.stride, call.padding};
  if (call.transposed) {
    arguments.insert(arguments.end(), {call.output_padding, call.groups, call.dilation});
  } else {
    arguments.insert(arguments.end(), {call.dilation, call.groups});
  }
  return may_be_wrong(*matrix_product(op), arguments);
}

TEST(ConvolutionFaults, AreFoundByTheirShapes) {
  for (const Call& call : suspects()) EXPECT_TRUE(is_suspect(call)) << call.input;
  for (const Call& call : others()) EXPECT_FALSE(is_suspect(call)) << call.input;
  // The result of the first is right, that of the last ones is not.
  EXPECT_FALSE(is_suspect(suspects().front(), /*recorded=*/false));
  EXPECT_TRUE(is_suspect(suspects().back(), /*recorded=*/false));
}

std::vector<c10::IValue> conv2d_arguments(const at::Tensor& input, const at::Tensor& weight,
                                          c10::IValue padding, std::int64_t groups = 1) {
  return {input, weight, c10::IValue(), Sizes{2, 2}, std::move(padding), Sizes{1, 1}, groups};
}

MatrixProduct product_of(const char* name, const char* overload) {
  return *matrix_product(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
}

TEST(ConvolutionFaults, OfStridesOver1x1KernelsAreAvoided) {
  const at::Tensor weight = torch::ones({16, 3, 1, 1}).requires_grad_();
  for (const Sizes& shape : {Sizes{2, 3, 9, 5}, Sizes{3, 9, 5}}) {
    const at::Tensor image = torch::ones({2, 3, 9, 5}).contiguous(at::MemoryFormat::ChannelsLast);
    const at::Tensor input = shape.size() == 4 ? image : image[0];
    const at::Tensor last =
        weight.detach().as_strided(weight.sizes(), {3, 1, 3, 3}).requires_grad_();
    for (const bool is_word : {false, true}) {
      auto arguments = is_word ? conv2d_arguments(input, last, std::string("valid"))
                               : conv2d_arguments(input, last, Sizes{0, 0});
      avoid_faults(product_of("aten::conv2d", is_word ? "padding" : ""), arguments);
      EXPECT_EQ(arguments[0].toTensor().size(-1), 3);
      EXPECT_EQ(arguments[0].toTensor().size(-2), 5);
      EXPECT_EQ(arguments[3].toIntVector(), (Sizes{1, 1}));
    }
  }
  // Without a gradient, or contiguous, nothing happens.
  for (const at::Tensor& other : {weight.detach(), weight}) {
    auto arguments = conv2d_arguments(torch::ones({2, 3, 9, 5}), other, Sizes{0, 0});
    avoid_faults(product_of("aten::conv2d", ""), arguments);
    EXPECT_EQ(arguments[3].toIntVector(), (Sizes{2, 2}));
  }
}

TEST(ConvolutionFaults, AreFoundWherePaddingIsAWord) {
  const at::Tensor input = torch::ones({2, 3, 5, 2});
  const at::Tensor weight = torch::ones({48, 1, 4, 2});
  const auto words = product_of("aten::conv2d", "padding");
  EXPECT_TRUE(may_be_wrong(words, conv2d_arguments(input, weight, std::string("valid"), 3)));
  EXPECT_FALSE(may_be_wrong(
      words, conv2d_arguments(torch::ones({2, 3, 9, 9}), weight, std::string("valid"), 3)));
  // Padding of 2 at both ends, and an image of 2: the first result meets places -2 and 2.
  const std::vector<c10::IValue> same{torch::ones({2, 4, 2}), torch::ones({4, 4, 2}),
                                      c10::IValue(),          Sizes{1},
                                      std::string("same"),    Sizes{4},
                                      std::int64_t{1}};
  EXPECT_TRUE(may_be_wrong(product_of("aten::conv1d", "padding"), same));
}

}  // namespace
}  // namespace semitone::amp::convolution_faults_test
