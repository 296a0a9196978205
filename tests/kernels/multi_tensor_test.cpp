// The unscale pass against its reference, bit for bit.

#include "src/kernels/multi_tensor.h"

#include "semitone/core/dtype.h"
#include "src/kernels/kernels.h"
#include "src/kernels/rounding.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace semitone::kernels::multi_tensor_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;

constexpr std::int64_t kChunk = 16 * 1024;  // of multi_tensor.cpp: its edges are worth testing
constexpr float kInvScale = 1.0F / 3;       // products that have to be rounded

// Random values over many binades, so that sums are rounded and some products are subnormal in
// fp16.
at::Tensor values(at::IntArrayRef shape, c10::ScalarType dtype) {
  const auto magnitude = torch::pow(2, torch::randint(-12, 8, shape).to(torch::kFloat));
  return (torch::randn(shape) * magnitude).to(dtype);
}

// Runs the same items through the kernels and through the reference, on separate memory, and
// compares the results and the flags. `make` creates new items with the same values at each call.
template <typename Make>
void expect_as_defined(Make&& make, float inv_scale = kInvScale) {
  std::vector<Unscale> got = make();
  std::vector<Unscale> want = make();
  auto got_inf = torch::zeros({1});
  auto want_inf = torch::zeros({1});
  multi_tensor_unscale(got, inv_scale, got_inf);
  ref::multi_tensor_unscale(want, inv_scale, want_inf);
  for (std::size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE("item " + std::to_string(i));
    expect_bitwise_equal(got[i].out, want[i].out);
  }
  expect_bitwise_equal(got_inf, want_inf);
}

struct Case {
  c10::ScalarType in;
  c10::ScalarType out;
  bool addend;
  bool in_place;
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  return dtype_name(info.param.in) + "_to_" + dtype_name(info.param.out) +
         (info.param.addend ? "_plus" : "") + (info.param.in_place ? "_in_place" : "");
}

class MultiTensorUnscale : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override { torch::manual_seed(1); }

  // An item over a gradient that already has the layout to test.
  static Unscale item(const at::Tensor& grad) {
    const at::Tensor own = at::empty_strided(grad.sizes(), grad.strides(), grad.options());
    own.copy_(grad);
    Unscale made{own, own, {}};
    if (!GetParam().in_place) {
      made.out =
          at::empty_strided(grad.sizes(), grad.strides(), grad.options().dtype(GetParam().out));
      made.out.fill_(7);
    }
    if (GetParam().addend)
      made.addend = at::linspace(-5, 5, grad.numel()).view(grad.sizes()).to(made.out.options());
    return made;
  }
};

TEST_P(MultiTensorUnscale, IsItsDefinitionAtEverySize) {
  // Around the widths of vectors (up to 64 lanes with a tail) and the edges of chunks.
  std::vector<std::int64_t> sizes{0,  1,  2,  3,  5,  7,  8,  9,   15,  16,
                                  17, 31, 32, 33, 63, 64, 65, 127, 1000};
  for (const auto edge : {kChunk, 2 * kChunk, 5 * kChunk}) {
    for (const auto offset : {-1, 0, 1, 17}) sizes.push_back(edge + offset);
  }
  std::vector<at::Tensor> grads;
  for (const auto size : sizes) grads.push_back(values({size}, GetParam().in));
  expect_as_defined([&] {
    std::vector<Unscale> items;
    for (const at::Tensor& grad : grads) items.push_back(item(grad));
    return items;
  });
}

TEST_P(MultiTensorUnscale, IsItsDefinitionInEveryLayout) {
  const auto dtype = GetParam().in;
  const std::vector<at::Tensor> grads{
      values({}, dtype),
      values({5, 7}, dtype).t(),
      values({2, 3, 4, 5}, dtype).contiguous(at::MemoryFormat::ChannelsLast),
      values({2, 3, 4, 5}, dtype).permute({3, 1, 0, 2}),
      values({4, 0, 3}, dtype),
  };
  expect_as_defined([&] {
    std::vector<Unscale> items;
    for (const at::Tensor& grad : grads) items.push_back(item(grad));
    return items;
  });
}

TEST_P(MultiTensorUnscale, WritesToViewsWithGapsAndReadsFromExpandedTensors) {
  const auto in = GetParam().in;
  const auto out = GetParam().out;
  const at::Tensor whole = values({6, 10}, in);
  const at::Tensor row = values({1, 10}, in);
  expect_as_defined([&] {
    const at::Tensor copy = whole.clone();
    std::vector<Unscale> items{{copy.slice(1, 0, 10, 2), copy.slice(1, 0, 10, 2), {}},
                               {row.expand({4, 10}), torch::full({4, 10}, 7, out), {}}};
    if (in != out) items[0].out = torch::full({6, 20}, 7, out).slice(1, 0, 20, 4);
    if (GetParam().addend)
      for (Unscale& made : items) made.addend = torch::ones_like(made.out).t().contiguous().t();
    return items;
  });
}

TEST_P(MultiTensorUnscale, SetsTheFlagForANonFiniteElementAnywhere) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::int64_t size = kChunk + 21;  // the last one lies in a tail
  for (const float bad : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
    for (const std::int64_t component : {std::int64_t{0}, size / 2, size - 1}) {
      SCOPED_TRACE(c10::str(bad, " at ", component));
      at::Tensor grad = values({size}, GetParam().in);
      grad[component] = bad;
      std::vector<Unscale> items{item(values({40}, GetParam().in)), item(grad)};
      auto found_inf = torch::zeros({1});
      multi_tensor_unscale(items, kInvScale, found_inf);
      EXPECT_EQ(found_inf.item<float>(), 1);
      EXPECT_FALSE(items[1].out[component].isfinite().item<bool>());
      expect_as_defined([&] { return std::vector<Unscale>{item(grad)}; });
    }
  }
}

TEST_P(MultiTensorUnscale, LeavesTheFlagAloneWhereAllIsFinite) {
  for (const float before : {0.0F, 1.0F}) {
    std::vector<Unscale> items{item(values({100}, GetParam().in))};
    auto found_inf = torch::full({1}, before);
    multi_tensor_unscale(items, kInvScale, found_inf);
    EXPECT_EQ(found_inf.item<float>(), before);
  }
}

TEST_P(MultiTensorUnscale, TestsTheResultNotTheGradient) {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto grad = torch::full({20}, 2.0, GetParam().in);
  const auto flag = [&](float inv_scale) {
    std::vector<Unscale> items{item(grad)};
    auto found_inf = torch::zeros({});
    multi_tensor_unscale(items, inv_scale, found_inf);
    return found_inf.item<float>();
  };
  EXPECT_EQ(flag(infinity), 1) << "a scale of 0";
  EXPECT_EQ(flag(0), 0) << "a scale of inf";
  EXPECT_EQ(flag(std::numeric_limits<float>::quiet_NaN()), 1);
  for (const float inv_scale : {infinity, 0.0F, 1e38F, 1e-38F})
    expect_as_defined([&] { return std::vector<Unscale>{item(grad)}; }, inv_scale);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, MultiTensorUnscale, testing::ValuesIn([] {
                           std::vector<Case> cases;
                           for (const bool addend : {false, true}) {
                             for (const auto dtype :
                                  {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
                               cases.push_back({dtype, dtype, addend, true});
                               cases.push_back({dtype, dtype, addend, false});
                             }
                             for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble})
                               cases.push_back({dtype, at::kFloat, addend, false});
                           }
                           return cases;
                         }()),
                         name_of);

TEST(MultiTensorUnscaleFlag, OverflowThatOnlyRoundingCausesIsFound) {
  // 65519.9 is finite in fp32 and in fp16 65504; 65520 rounds to infinity.
  for (const auto& [value, expected] : {std::pair{65519.0F, 0.0F}, std::pair{65520.0F, 1.0F}}) {
    const auto grad = torch::full({3}, 1.0, at::kHalf);
    const auto addend = torch::zeros({3}, at::kHalf);
    std::vector<Unscale> items{{grad, grad, addend}};
    auto found_inf = torch::zeros({1});
    multi_tensor_unscale(items, value, found_inf);
    EXPECT_EQ(found_inf.item<float>(), expected) << value;
  }
}

// In an accumulation each addition must report whether it was the one that overflowed.
TEST(MultiTensorUnscaleFlag, IsNotSetForWhatWasInTheAddendAlready) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  struct Sum {
    float grad;
    float addend;
    float expected;
  };
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    for (const Sum& sum :
         {Sum{1, infinity, 0}, Sum{1, nan, 0}, Sum{infinity, infinity, 1}, Sum{nan, infinity, 1},
          Sum{-infinity, infinity, 1}, Sum{infinity, 1, 1}, Sum{1, 1, 0}}) {
      SCOPED_TRACE(c10::str(dtype, ": ", sum.grad, " + ", sum.addend));
      for (const std::int64_t size : {1, 100}) {
        const auto make = [&] {
          const auto grad = torch::full({size}, 1.0, dtype);
          const auto addend = torch::full({size}, 2.0, dtype);
          grad[size / 2] = sum.grad;
          addend[size / 2] = sum.addend;
          return std::vector<Unscale>{{grad, addend, addend}};  // written over the addend
        };
        auto found_inf = torch::zeros({1});
        multi_tensor_unscale(make(), 1, found_inf);
        EXPECT_EQ(found_inf.item<float>(), sum.expected);
        expect_as_defined(make, 1);
      }
    }
  }
}

TEST(MultiTensorUnscaleFlag, IsSetWhereTwoFiniteNumbersOverflowTogether) {
  const auto flag = [](double grad, double addend, at::ScalarType dtype) {
    auto found_inf = torch::zeros({1});
    std::vector<Unscale> items{{torch::full({20}, grad, dtype), torch::empty({20}, dtype),
                                torch::full({20}, addend, dtype)}};
    multi_tensor_unscale(items, 1, found_inf);
    return found_inf.item<float>();
  };
  EXPECT_EQ(flag(60000, 6000, at::kHalf), 1);
  EXPECT_EQ(flag(60000, 5000, at::kHalf), 0);
  EXPECT_EQ(flag(3e38, 3e38, at::kFloat), 1);
}

TEST(MultiTensorUnscaleList, MayBeEmptyOrOfMixedDtypes) {
  auto found_inf = torch::zeros({1});
  multi_tensor_unscale({}, 2, found_inf);
  EXPECT_EQ(found_inf.item<float>(), 0);

  torch::manual_seed(2);
  std::vector<at::Tensor> grads;
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kFloat})
    grads.push_back(values({kChunk + 3}, dtype));
  expect_as_defined([&] {
    std::vector<Unscale> items;
    for (const at::Tensor& grad : grads) {
      const auto wide = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
      items.push_back({grad, at::empty_like(grad, grad.options().dtype(wide)), {}});
    }
    return items;
  });
}

TEST(MultiTensorUnscaleList, ANegativeViewIsReadNegated) {
  const auto base = values({100}, at::kFloat);
  expect_as_defined(
      [&] { return std::vector<Unscale>{{at::_neg_view(base.clone()), at::empty({100}), {}}}; });
}

TEST(MultiTensorUnscaleList, BumpsTheVersionOfWhatItWrites) {
  auto grad = values({100}, at::kFloat);
  const auto before = grad._version();
  auto found_inf = torch::zeros({1});
  std::vector<Unscale> items{{grad, grad, {}}};
  multi_tensor_unscale(items, 2, found_inf);
  EXPECT_GT(grad._version(), before);
}

TEST(MultiTensorUnscaleScale, MayLieInTheDevicesMemory) {
  torch::manual_seed(3);
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kDouble}) {
    const at::Tensor grad = torch::randn({1000}).to(dtype);
    at::Tensor got = grad.clone();
    at::Tensor want = grad.clone();
    at::Tensor found_inf = torch::zeros({});
    at::Tensor inverse = torch::full({1}, 3, torch::kFloat);
    const std::vector<Unscale> items{{got, got, {}}};
    inverse.fill_(0.37F);  // it is read when the work runs
    multi_tensor_unscale(items, InverseScale(inverse), found_inf);
    multi_tensor_unscale(std::vector<Unscale>{{want, want, {}}}, 0.37F, found_inf);
    expect_bitwise_equal(got, want);
  }
}

TEST(MultiTensorUnscaleErrors, NameWhatIsWrong) {
  const auto grad = torch::ones({4});
  const auto run = [&](Unscale item, at::Tensor found_inf = torch::zeros({1})) {
    return [item, found_inf]() mutable { multi_tensor_unscale({&item, 1}, 1, found_inf); };
  };
  const auto meta = torch::ones({4}, torch::kMeta);
  expect_error(run({grad.to(torch::kInt), grad, {}}), {"[kernels.multi_tensor_unscale]", "int32"});
  expect_error(
      [&] {
        at::Tensor flag = torch::zeros({});
        multi_tensor_unscale({}, InverseScale(torch::ones({2})), flag);
      },
      {"[kernels.multi_tensor_unscale]", "an inverse scale of one float32"});
  expect_error(run({grad, grad.to(torch::kInt), {}}), {"floating-point", "int32"});
  expect_error(run({grad, grad, grad.to(torch::kLong)}), {"floating-point", "int64"});
  expect_error(run({meta, meta, {}}), {"on one device", "meta", "cpu"});
  expect_error(run({grad, meta, {}}), {"on one device", "meta", "cpu"});
  expect_error(run({grad, grad, meta}), {"on one device", "meta", "cpu"});
  expect_error(run({grad, torch::ones({5}), {}}), {"shape", "[5]", "[4]"});
  expect_error(run({grad, grad, torch::ones({2, 2})}), {"shape", "[2, 2]", "[4]"});
  expect_error(run({grad.to_sparse(), grad, {}}), {"strided", "Sparse"});
  expect_error(run({at::Tensor(), grad, {}}), {"undefined"});
  expect_error(run({grad, at::Tensor(), {}}), {"undefined"});
  expect_error(run({grad, grad, {}}, torch::zeros({2})), {"found_inf", "2 of float32"});
  expect_error(run({grad, grad, {}}, torch::zeros({1}, torch::kBool)), {"found_inf", "bool"});
}

TEST(MultiTensorUnscaleErrors, LeaveEveryTensorAsItWas) {
  auto good = torch::full({4}, 8.0);
  auto found_inf = torch::zeros({1});
  std::vector<Unscale> items{{good, good, {}}, {torch::ones({4}), torch::ones({5}), {}}};
  EXPECT_THROW(multi_tensor_unscale(items, 0.5, found_inf), Error);
  expect_bitwise_equal(good, torch::full({4}, 8.0));
}

// ---- every instruction set that this processor has ----------------------------------------------

class UnscaleTargets : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

std::uint16_t narrow(float value, Format format) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return format == Format::fp16 ? fp16_from_fp32(bits) : bf16_from_fp32(bits);
}

float widen(std::uint16_t code, Format format) {
  return std::bit_cast<float>(format == Format::fp16 ? fp32_from_fp16(code) : fp32_from_bf16(code));
}

// Element i of memory in a format.
float element(const std::vector<char>& memory, Format format, std::size_t i) {
  if (format == Format::fp32) {
    float value = 0;
    std::memcpy(&value, memory.data() + 4 * i, 4);
    return value;
  }
  std::uint16_t code = 0;
  std::memcpy(&code, memory.data() + 2 * i, 2);
  return widen(code, format);
}

std::vector<char> memory_of(const std::vector<float>& numbers, Format format) {
  std::vector<char> memory(numbers.size() * bytes_of(format));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (format == Format::fp32) {
      std::memcpy(memory.data() + 4 * i, &numbers[i], 4);
    } else {
      const std::uint16_t code = narrow(numbers[i], format);
      std::memcpy(memory.data() + 2 * i, &code, 2);
    }
  }
  return memory;
}

// Every code of both 16-bit formats as input, which covers subnormals, infinities, NaNs and ties.
TEST_P(UnscaleTargets, EqualsTheDefinitionOneNumberAtATime) {
  std::vector<float> numbers(65536 + 5);
  std::vector<float> others(numbers.size());
  for (const auto& [in, out] : {std::pair{Format::fp32, Format::fp32},
                                {Format::fp16, Format::fp16},
                                {Format::bf16, Format::bf16},
                                {Format::fp16, Format::fp32},
                                {Format::bf16, Format::fp32}}) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = widen(static_cast<std::uint16_t>(i), in == Format::fp32 ? Format::fp16 : in);
      others[i] = 0.1F * static_cast<float>(i % 97);
    }
    const std::vector<char> grads = memory_of(numbers, in);
    const std::vector<char> addends = memory_of(others, out);
    for (const bool plus : {false, true}) {
      std::vector<char> got(numbers.size() * bytes_of(out));
      const bool flag = unscale(grads.data(), in, plus ? addends.data() : nullptr, got.data(), out,
                                numbers.size(), kInvScale);
      EXPECT_TRUE(flag) << "there are infinities among the inputs";
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        volatile float product = element(grads, in, i) * kInvScale;  // rounded before the addition
        float want = product;
        if (plus) want = product + element(addends, out, i);
        if (out != Format::fp32) want = widen(narrow(want, out), out);
        const float value = element(got, out, i);
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(value)) << "element " << i;
        } else {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(value), std::bit_cast<std::uint32_t>(want))
              << "element " << i << " of " << static_cast<int>(in) << " to "
              << static_cast<int>(out);
        }
      }
    }
  }
}

TEST_P(UnscaleTargets, FindsOneNonFiniteElementInVectorsAndTails) {
  for (const std::size_t size : std::initializer_list<std::size_t>{1, 3, 4, 7, 8, 16, 19, 33, 67}) {
    std::vector<float> numbers(size, 1.0F);
    std::vector<float> out(size);
    EXPECT_FALSE(unscale(numbers.data(), Format::fp32, nullptr, out.data(), Format::fp32, size, 1));
    for (std::size_t i = 0; i < size; ++i) {
      numbers[i] = std::numeric_limits<float>::infinity();
      EXPECT_TRUE(unscale(numbers.data(), Format::fp32, nullptr, out.data(), Format::fp32, size, 1))
          << i << " of " << size;
      numbers[i] = 1;
    }
  }
}

TEST_P(UnscaleTargets, WritesNothingBehindTheEnd) {
  for (const Format format : {Format::fp32, Format::fp16, Format::bf16}) {
    for (std::size_t size = 0; size < 40; ++size) {
      const std::vector<char> in = memory_of(std::vector<float>(size, 2.0F), format);
      std::vector<char> out((size + 1) * bytes_of(format), 'x');
      unscale(in.data(), format, nullptr, out.data(), format, size, 1);
      for (std::size_t i = 0; i < bytes_of(format); ++i)
        ASSERT_EQ(out[size * bytes_of(format) + i], 'x') << size;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, UnscaleTargets,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

}  // namespace
}  // namespace semitone::kernels::multi_tensor_test
