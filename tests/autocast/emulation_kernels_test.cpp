// Which calls use native fp16 kernels, and convolutions that LibTorch computes wrongly.

#include "semitone/autocast/autocast.h"
#include "semitone/core/dtype.h"
#include "src/autocast/convolution_faults.h"
#include "src/autocast/emulation.h"
#include "src/core/native_kernels.h"
#include "tests/autocast/emulation_fixture.h"
#include "tests/support/casts.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace semitone::amp::emulation_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;

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
