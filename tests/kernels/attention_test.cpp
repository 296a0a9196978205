// Attention in blocks against its reference, and that against LibTorch's.

#include "src/kernels/attention.h"

#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace semitone::kernels::attention_test {
namespace {

using test::expect_bitwise_equal;
using test::near;
using test::rounding_tolerance;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Sizes {
  std::int64_t batch, heads, key_heads, queries, keys, size;
};

// Lengths around those of a block of queries (64) and of keys (128 and 512), and short ones; heads
// that share keys; heads of various sizes.
std::vector<Sizes> all_sizes() {
  return {{2, 3, 3, 37, 53, 32},   {1, 2, 2, 1, 1, 16},       {1, 2, 1, 1, 130, 48},
          {1, 4, 2, 64, 128, 64},  {2, 6, 2, 65, 129, 64},    {1, 3, 3, 130, 63, 80},
          {1, 2, 2, 200, 527, 64}, {1, 1, 1, 127, 1100, 128}, {40, 1, 1, 20, 20, 16}};
}

// (N, heads, length, D), stored as (N, length, heads, D), as models make it.
at::Tensor heads_of(std::int64_t batch, std::int64_t heads, std::int64_t length,
                    std::int64_t size) {
  return torch::randn({batch, length, heads, size}).to(torch::kBFloat16).transpose(1, 2);
}

struct Inputs {
  explicit Inputs(const Sizes& sizes)
      : query(heads_of(sizes.batch, sizes.heads, sizes.queries, sizes.size)),
        key(heads_of(sizes.batch, sizes.key_heads, sizes.keys, sizes.size)),
        value(heads_of(sizes.batch, sizes.key_heads, sizes.keys, sizes.size)),
        grad(heads_of(sizes.batch, sizes.heads, sizes.queries, sizes.size)) {}

  Inputs to(c10::ScalarType dtype) const {
    Inputs result = *this;
    for (at::Tensor* tensor : {&result.query, &result.key, &result.value, &result.grad})
      *tensor = tensor->to(dtype);
    return result;
  }

  at::Tensor query, key, value, grad;
};

std::vector<at::Tensor> list_of(const AttentionGradients& gradients) {
  return {gradients.query, gradients.key, gradients.value};
}

std::vector<at::Tensor> gradients_of(const Inputs& in, const AttentionResult& result,
                                     const Attention& attention) {
  return list_of(attention_gradients(in.grad, in.query, in.key, in.value, result, attention));
}

// What a mask adds to scores.
at::Tensor numbers_of(const at::Tensor& mask) {
  if (mask.scalar_type() != torch::kBool) return mask.to(torch::kDouble);
  return torch::zeros(mask.sizes(), torch::kDouble).masked_fill_(~mask, -kInfinity);
}

// What rounding can do to results: of probabilities, of the result (and so of each query's sum over
// grad * result), of the scores' gradients, and of their sums. In fp64.
struct Bounds {
  at::Tensor output;
  std::vector<at::Tensor> gradients;
};

Bounds bounds_of(const Inputs& exact, const AttentionResult& want,
                 const std::vector<at::Tensor>& gradients, const Attention& attention) {
  const auto groups = exact.query.size(1) / exact.key.size(1);
  const auto for_heads = [&](const at::Tensor& tensor) {
    return tensor.repeat_interleave(groups, 1);
  };
  const auto of_key_heads = [&](const at::Tensor& tensor) {
    return tensor.unflatten(1, {exact.key.size(1), groups}).sum(2);
  };
  const at::Tensor keys = for_heads(exact.key);
  const at::Tensor values = for_heads(exact.value);
  at::Tensor scores = exact.query.matmul(keys.transpose(-2, -1)).mul(attention.scale);
  if (attention.mask.defined()) scores.add_(numbers_of(attention.mask));
  if (attention.causal)
    scores.masked_fill_(torch::ones(scores.sizes(), torch::kBool).triu(1), -kInfinity);
  const at::Tensor p = scores.sub(want.max.unsqueeze(-1)).sub(want.log_sum.unsqueeze(-1)).exp();
  at::Tensor kept = torch::ones_like(p);
  if (attention.dropout.has_value())
    kept = ref::attention_dropout(*attention.dropout, exact.query, exact.key);
  const at::Tensor delta = exact.grad.mul(want.output).sum(-1, true);
  const at::Tensor of_delta = exact.grad.abs().mul(want.output.abs()).sum(-1, true);
  const at::Tensor of_scores = exact.grad.matmul(values.transpose(-2, -1))
                                   .mul(kept)
                                   .sub(delta)
                                   .abs()
                                   .add(of_delta)
                                   .mul(p)
                                   .mul(attention.scale);
  // In units of half an epsilon, with room for sums in fp32.
  const double unit = rounding_tolerance(torch::kBFloat16) * 1.01;
  // Probabilities below the smallest normal number of fp32 are 0.
  constexpr double kSmall = 1e-30;
  const at::Tensor query = of_scores.matmul(keys.abs());
  const at::Tensor key = of_key_heads(of_scores.transpose(-2, -1).matmul(exact.query.abs()));
  const at::Tensor value = of_key_heads(p.mul(kept).transpose(-2, -1).matmul(exact.grad.abs()));
  const auto with_result = [&](const at::Tensor& terms, const at::Tensor& result) {
    return terms.add(result.abs()).mul(unit).add(kSmall);
  };
  return {with_result(p.mul(kept).matmul(values.abs()), want.output),
          {with_result(query, gradients[0]), with_result(key, gradients[1]),
           with_result(value, gradients[2])}};
}

void expect_within(const at::Tensor& got, const at::Tensor& want, const at::Tensor& bound) {
  EXPECT_EQ(got.scalar_type(), torch::kBFloat16);
  ASSERT_EQ(got.sizes(), want.sizes());
  const at::Tensor off = got.to(torch::kDouble).sub(want).abs();
  EXPECT_TRUE(off.le(bound).all().item<bool>())
      << "off by up to " << off.div(bound).max().item<double>() << " of what is allowed";
  // Rounding errors mostly cancel.
  EXPECT_LT(off.norm().item<double>(), 0.5 * bound.norm().item<double>());
}

// The reference in fp64 on the same numbers.
void expect_as_defined(const Inputs& in, const Attention& attention) {
  const AttentionResult got = kernels::attention(in.query, in.key, in.value, attention);
  const Inputs exact = in.to(torch::kDouble);
  const AttentionResult want = ref::attention(exact.query, exact.key, exact.value, attention);
  const auto gradients = gradients_of(in, got, attention);
  const auto wanted = gradients_of(exact, want, attention);
  const Bounds bounds = bounds_of(exact, want, wanted, attention);
  expect_within(got.output, want.output, bounds.output);
  EXPECT_TRUE(near(got.max, want.max, test::reduction_tolerance(torch::kFloat, 64)));
  // The logarithm has the rounding errors of scores.
  EXPECT_TRUE(near(got.max.to(torch::kDouble).add(got.log_sum), want.max.add(want.log_sum),
                   test::reduction_tolerance(torch::kFloat, 64)));
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    SCOPED_TRACE(i);
    expect_within(gradients[i], wanted[i], bounds.gradients[i]);
  }
}

TEST(Attention, TheReferenceIsLibTorchsWithItsGradients) {
  torch::manual_seed(1);
  at::Tensor hidden = torch::rand({2, 1, 5, 7}) < 0.5;
  hidden[0][0][1].fill_(true);  // a query without keys
  const std::vector<Attention> calls{
      {.scale = 0.3},
      {.scale = 0.3, .causal = true},
      {.scale = 0.3, .mask = ~hidden},
      {.scale = 0.3, .mask = torch::randn({4, 1, 7}, torch::kDouble)}};
  for (const Attention& settings : calls) {
    const Inputs in = Inputs({2, 4, 2, 5, 7, 16}).to(torch::kDouble);
    const std::vector<at::Tensor> leaves{in.query.clone().requires_grad_(),
                                         in.key.clone().requires_grad_(),
                                         in.value.clone().requires_grad_()};
    const at::Tensor want = std::get<0>(at::_scaled_dot_product_attention_math(
        leaves[0], leaves[1], leaves[2],
        settings.mask.defined() ? std::optional(numbers_of(settings.mask)) : std::nullopt, 0,
        settings.causal, {}, settings.scale, /*enable_gqa=*/true));
    const AttentionResult got = ref::attention(in.query, in.key, in.value, settings);
    EXPECT_TRUE(near(got.output, want, 1e-12));
    EXPECT_TRUE(
        near(list_of(ref::attention_gradients(in.grad, in.query, in.key, in.value, got, settings)),
             torch::autograd::grad({want}, leaves, {in.grad}), 1e-12));
  }
}

// With the vectors of each instruction set of this processor. Where the processor has no products
// in bf16 this is the reference in fp32.
class AttentionOn : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(AttentionOn, EqualsItsDefinition) {
  torch::manual_seed(2);
  for (const Sizes& sizes : all_sizes()) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(c10::str(sizes.queries, " queries, ", sizes.keys, " keys, size ", sizes.size,
                            causal ? ", causal" : ""));
      expect_as_defined(Inputs(sizes), {.scale = 1 / std::sqrt(static_cast<double>(sizes.size)),
                                        .causal = causal});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionOn,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return hwy::TargetName(target.param); });

struct MaskCase {
  std::string name;
  at::Tensor mask;
};

// Masks as models have them: padding, also of whole sequences and on the left; positions; biases.
std::vector<MaskCase> masks_of(const Sizes& sizes) {
  const auto [batch, heads, key_heads, queries, keys, size] = sizes;
  const at::Tensor lengths = torch::randint(keys + 1, {batch, 1, 1, 1});
  const at::Tensor place = torch::arange(keys);
  const at::Tensor padding = place < lengths;
  const at::Tensor bias = torch::randn({batch, heads, queries, keys});
  const at::Tensor near = (place - torch::arange(queries).unsqueeze(1)).abs() < 20;
  return {{"padding", padding},
          {"padding on the left", place >= lengths},
          {"padding, expanded", padding.expand({batch, heads, queries, keys})},
          {"padding in numbers", numbers_of(padding).to(torch::kBFloat16)},
          {"neighbours", near},
          {"neighbours of each head", near.unsqueeze(0).repeat({heads, 1, 1})},
          {"queries", torch::rand({batch, 1, queries, 1}) < 0.7},
          {"bias", bias},
          {"transposed bias", bias.transpose(2, 3).contiguous().transpose(2, 3)},
          {"bias in bf16", bias.to(torch::kBFloat16)},
          {"bias of keys", torch::randn({keys})},
          {"one number", torch::randn({})},
          {"bias and padding", bias + numbers_of(padding).to(torch::kFloat)}};
}

TEST_P(AttentionOn, WithAMaskEqualsItsDefinition) {
  torch::manual_seed(21);
  for (const Sizes& sizes : all_sizes()) {
    for (const MaskCase& mask : masks_of(sizes)) {
      SCOPED_TRACE(c10::str(sizes.queries, " queries, ", sizes.keys, " keys, ", mask.name));
      expect_as_defined(Inputs(sizes), {.scale = 0.2, .mask = mask.mask});
    }
  }
  const Sizes sizes{2, 2, 2, 100, 300, 32};
  expect_as_defined(Inputs(sizes),
                    {.scale = 0.2, .causal = true, .mask = masks_of(sizes).front().mask});
}

TEST_P(AttentionOn, WithDropoutEqualsItsDefinition) {
  torch::manual_seed(24);
  std::uint64_t seed = 7;
  for (const Sizes& sizes : all_sizes()) {
    for (const double p : {0.1, 0.9}) {
      SCOPED_TRACE(c10::str(sizes.queries, " queries, ", sizes.keys, " keys, p ", p));
      const Dropout dropout(p, {.seed = ++seed, .offset = 3});
      expect_as_defined(Inputs(sizes), {.scale = 0.2, .causal = p > 0.5, .dropout = dropout});
      expect_as_defined(Inputs(sizes),
                        {.scale = 0.2, .mask = masks_of(sizes).back().mask, .dropout = dropout});
    }
  }
}

// With equal probabilities and the values of an identity matrix, the output is the kept ones.
TEST(Attention, DropsProbabilitiesIndependently) {
  constexpr std::int64_t kKeysAndSize = 128;
  Inputs in({3, 2, 1, 100, kKeysAndSize, kKeysAndSize});
  in.query.zero_();
  in.value = torch::eye(kKeysAndSize).to(torch::kBFloat16).expand_as(in.value);
  const double p = 0.25;
  const Dropout dropout(p, {.seed = 5});
  const Attention settings{.scale = 1, .dropout = dropout};
  const at::Tensor output = kernels::attention(in.query, in.key, in.value, settings).output;
  const at::Tensor kept = output.ne(0).to(torch::kDouble);
  EXPECT_TRUE(kept.eq(ref::attention_dropout(dropout, in.query, in.key).ne(0)).all().item<bool>());
  const auto count = static_cast<double>(kept.numel());
  EXPECT_NEAR(kept.mean().item<double>(), 1 - p, 4 * std::sqrt(p * (1 - p) / count));
  // Sequences, heads, queries and keys differ.
  const at::Tensor centred = kept - (1 - p);
  for (const auto dim : {0, 1, 2, 3}) {
    const auto size = kept.size(dim);
    const at::Tensor products = centred.narrow(dim, 0, size - 1) * centred.narrow(dim, 1, size - 1);
    EXPECT_LT(std::abs(products.mean().item<double>()),
              4 * p * (1 - p) / std::sqrt(static_cast<double>(products.numel())))
        << dim;
  }
}

TEST(Attention, DropoutOfOneLeavesNothing) {
  torch::manual_seed(25);
  const Inputs in({1, 2, 2, 70, 140, 32});
  const Attention settings{.scale = 0.2, .dropout = Dropout(1, {.seed = 5})};
  const auto got = kernels::attention(in.query, in.key, in.value, settings);
  EXPECT_TRUE(got.output.eq(0).all().item<bool>());
  for (const at::Tensor& gradient : gradients_of(in, got, settings))
    EXPECT_TRUE(gradient.eq(0).all().item<bool>());
}

// Also where all keys after them, and whole blocks of keys, are hidden.
TEST(Attention, QueriesWithoutKeysHaveResultsAndGradientsOfZero) {
  torch::manual_seed(22);
  const Inputs in({2, 2, 2, 70, 600, 16});
  at::Tensor mask = torch::ones({2, 1, 70, 600}, torch::kBool);
  mask[0].fill_(false);
  mask[1].select(1, 7).fill_(false);
  for (const at::Tensor& any : {mask, mask.select(2, 7).unsqueeze(2)}) {
    const Attention settings{.scale = 0.25, .mask = any};
    const auto got = kernels::attention(in.query, in.key, in.value, settings);
    const auto gradients = gradients_of(in, got, settings);
    for (const at::Tensor& result :
         {got.output[0], gradients[0][0], gradients[1][0], gradients[2][0],
          got.output[1].select(1, 7), gradients[0][1].select(1, 7)})
      EXPECT_TRUE(result.eq(0).all().item<bool>());
    EXPECT_TRUE(got.max[0].eq(0).all().item<bool>());
    EXPECT_TRUE(got.log_sum[0].eq(kInfinity).all().item<bool>());
  }
}

// So large that nothing is left of the scores: the query attends to all keys alike, if it has no
// others.
TEST(Attention, QueriesWithLargeNumbersForAllKeysHaveTheGradientsOfTheirMeans) {
  torch::manual_seed(24);
  const Inputs in({2, 2, 2, 70, 300, 16});
  for (const float number : {-1e30F, std::numeric_limits<float>::lowest()}) {
    SCOPED_TRACE(number);
    at::Tensor mask = torch::zeros({2, 1, 70, 300});
    mask[0].fill_(number);
    mask[1].slice(0, 7, 9).fill_(number);
    mask[1].slice(1, 200).fill_(number);
    expect_as_defined(in, {.scale = 0.25, .mask = mask});
    expect_as_defined(in, {.scale = 0.25, .mask = mask, .dropout = Dropout(0.25, {.seed = 9})});
  }
}

// The rounded scores are the same in both passes, or neighbours, which are 64 apart.
TEST(Attention, ScoresThatRoundOtherwiseInTheBackwardPassHaveFiniteGradients) {
  torch::manual_seed(25);
  Inputs in({1, 2, 2, 70, 300, 64});
  in.query *= 4;  // scores of about -32 and 32, between the neighbours
  const at::Tensor mask = torch::full({70, 300}, -1e9F);
  const Attention settings{.scale = 1, .mask = mask};
  const auto got = kernels::attention(in.query, in.key, in.value, settings);
  const auto gradients = gradients_of(in, got, settings);
  const double most = in.grad.abs().sum().item<double>() * in.query.abs().max().item<double>();
  for (const at::Tensor& gradient : gradients) EXPECT_LT(gradient.abs().max().item<double>(), most);
}

// A matrix of zeros whose end is the end of readable memory.
class ZerosBeforeAGuard {
 public:
  ZerosBeforeAGuard(std::int64_t rows, std::int64_t columns) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const auto bytes = static_cast<std::size_t>(rows * columns) * sizeof(float);
    const std::size_t readable = (bytes + page - 1) / page * page;
    size_ = readable + page;
    memory_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw std::runtime_error("mmap");
    auto* const begin = static_cast<std::byte*>(memory_);
    if (::mprotect(begin + readable, page, PROT_NONE) != 0) throw std::runtime_error("mprotect");
    tensor_ = torch::from_blob(begin + (readable - bytes), {rows, columns});
  }
  ZerosBeforeAGuard(const ZerosBeforeAGuard&) = delete;
  ZerosBeforeAGuard& operator=(const ZerosBeforeAGuard&) = delete;
  ~ZerosBeforeAGuard() { ::munmap(memory_, size_); }

  const at::Tensor& tensor() const { return tensor_; }

 private:
  void* memory_ = nullptr;
  std::size_t size_ = 0;
  at::Tensor tensor_;
};

TEST(Attention, ReadsNothingAfterAMask) {
  torch::manual_seed(26);
  for (const std::int64_t queries : {1, 2, 17, 49, 64, 70}) {
    const Inputs in({1, 2, 2, queries, 512, 16});
    const ZerosBeforeAGuard mask(queries, 512);
    const Attention masked{.scale = 0.25, .mask = mask.tensor()};
    const auto got = kernels::attention(in.query, in.key, in.value, masked);
    const Attention plain{.scale = 0.25};
    const auto want = kernels::attention(in.query, in.key, in.value, plain);
    EXPECT_TRUE(near(got.output, want.output, rounding_tolerance(torch::kBFloat16)));
    expect_as_defined(in, masked);  // also backward
  }
}

// The probabilities of a query sum to 1, so all values' gradients sum to those of the results. A
// scale that is no power of two rounds.
TEST(Attention, ProbabilitiesOfHugeScoresSumToOne) {
  torch::manual_seed(27);
  for (const double size : {1e5, 1e7, 1e12, 1e30}) {
    SCOPED_TRACE(size);
    Inputs in({1, 2, 2, 70, 130, 48});
    in.query *= size;
    const Attention settings{.scale = 1 / std::sqrt(48.0)};
    const auto got = kernels::attention(in.query, in.key, in.value, settings);
    EXPECT_LE(got.output.abs().max().item<double>(), in.value.abs().max().item<double>());
    const at::Tensor sums = gradients_of(in, got, settings)[2].to(torch::kDouble).sum(2);
    const at::Tensor wanted = in.grad.to(torch::kDouble).sum(2);
    const at::Tensor most = in.grad.to(torch::kDouble).abs().sum(2).mul(0.02);
    EXPECT_TRUE(sums.sub(wanted).abs().le(most).all().item<bool>());
  }
}

// NaNs in what no query attends to, as in padding that was never written, may be lost, but not
// those in a mask.
TEST(Attention, ANanInAMaskIsNotLost) {
  torch::manual_seed(23);
  const Inputs in({1, 1, 1, 70, 80, 16});
  at::Tensor mask = torch::zeros({70, 80});
  mask[3][5] = kNan;
  const Attention settings{.scale = 0.25, .mask = mask};
  const auto got = kernels::attention(in.query, in.key, in.value, settings);
  const at::Tensor broken = got.output.isnan().any(-1).flatten();
  EXPECT_TRUE(broken.nonzero().flatten().equal(torch::tensor({std::int64_t{3}})));
  EXPECT_TRUE(gradients_of(in, got, settings)[2].isnan().all(-1).any().item<bool>());
}

TEST(Attention, LargeScoresDoNotOverflow) {
  torch::manual_seed(3);
  Inputs in({1, 2, 2, 70, 600, 32});
  in.query *= 64;  // scores up to about 1000, each of them a probability of 0 or 1
  expect_as_defined(in, {.scale = 1, .causal = false});
  expect_as_defined(in, {.scale = 1, .causal = true});
}

TEST(Attention, ReadsAnyLayout) {
  torch::manual_seed(4);
  Inputs in({2, 2, 2, 30, 40, 32});
  const Attention settings{.scale = 0.2};
  const auto want = kernels::attention(in.query, in.key, in.value, settings);
  const auto wanted = gradients_of(in, want, settings);
  const auto expect_the_same = [&] {
    const auto got = kernels::attention(in.query, in.key, in.value, settings);
    expect_bitwise_equal(got.output, want.output);
    expect_bitwise_equal(gradients_of(in, got, settings), wanted);
  };
  in.query = in.query.contiguous();
  in.key = in.key.transpose(2, 3).contiguous().transpose(2, 3);
  expect_the_same();
  in.value = torch::cat({in.value, in.value}, 3).slice(3, 0, 64, 2).mul(0).add(in.value);
  in.grad = torch::stack({in.grad, in.grad}, -1).select(-1, 0);
  expect_the_same();
  // One row, element or head for all.
  in.grad = torch::ones({1, 1, 1, 1}, torch::kBFloat16).expand(in.query.sizes());
  const auto of_ones = gradients_of(in, want, settings);
  in.grad = in.grad.contiguous();
  expect_bitwise_equal(of_ones, gradients_of(in, want, settings));
  const at::Tensor key = in.key.slice(1, 0, 1);
  const auto expanded =
      kernels::attention(in.query, key.expand(in.key.sizes()), in.value, settings);
  expect_bitwise_equal(
      expanded.output,
      kernels::attention(in.query, key.expand(in.key.sizes()).contiguous(), in.value, settings)
          .output);
}

TEST(Attention, ThreadsHaveNoPartInTheResults) {
  const int before = at::get_num_threads();
  torch::manual_seed(5);
  // One key head, whose queries are shared by threads, and many.
  for (const Sizes& sizes : {Sizes{1, 3, 1, 300, 300, 32}, Sizes{6, 8, 8, 100, 90, 32}}) {
    const Inputs in(sizes);
    const Attention settings{.scale = 0.2, .causal = true, .dropout = Dropout(0.1, {.seed = 8})};
    at::set_num_threads(1);
    const auto want = kernels::attention(in.query, in.key, in.value, settings);
    const auto wanted = gradients_of(in, want, settings);
    for (const int threads : {2, 3, 5}) {
      at::set_num_threads(threads);
      const auto got = kernels::attention(in.query, in.key, in.value, settings);
      expect_bitwise_equal(got.output, want.output);
      expect_bitwise_equal(got.max, want.max);
      expect_bitwise_equal(got.log_sum, want.log_sum);
      expect_bitwise_equal(gradients_of(in, got, settings), wanted);
    }
  }
  at::set_num_threads(before);
}

// A NaN or an infinity reaches all that depends on it. It may also reach what multiplies it by a
// probability of 0, as in LibTorch.
TEST(Attention, NansAndInfinitiesAreNotLost) {
  torch::manual_seed(6);
  const Attention settings{.scale = 0.2, .causal = true};
  const Inputs whole({1, 1, 1, 150, 150, 16});
  const auto clean = kernels::attention(whole.query, whole.key, whole.value, settings);
  const auto broken_rows = [](const at::Tensor& tensor) {
    return tensor.isfinite().logical_not().any(-1).flatten();
  };
  for (const float value : {kNan, kInfinity}) {
    Inputs in = whole;
    in.query = in.query.clone();
    in.query.select(2, 40).fill_(value);
    const auto output = kernels::attention(in.query, in.key, in.value, settings).output;
    EXPECT_TRUE(broken_rows(output).nonzero().flatten().equal(torch::tensor({std::int64_t{40}})));
    const at::Tensor others = broken_rows(output).logical_not();
    expect_bitwise_equal(output.flatten(0, 2).index({others}),
                         clean.output.flatten(0, 2).index({others}));
    for (const bool is_key : {true, false}) {
      in = whole;
      at::Tensor& changed = is_key ? in.key : in.value;
      changed = changed.clone();
      changed.select(2, 141).fill_(value);
      const auto with_key = kernels::attention(in.query, in.key, in.value, settings).output;
      // -inf times a query's negative sum may be a probability of 0, so only NaN is certain.
      if (is_key && value == kInfinity) continue;
      EXPECT_TRUE(broken_rows(with_key).slice(0, 141).all().item<bool>()) << is_key;
      if (!has_attention_kernel(in.query, in.key, in.value, settings)) continue;
      EXPECT_FALSE(broken_rows(with_key).slice(0, 0, 128).any().item<bool>()) << is_key;
    }
  }
  Inputs in = whole;
  in.grad = in.grad.clone();
  in.grad.select(2, 10).fill_(kNan);
  const auto gradients = gradients_of(in, clean, settings);
  EXPECT_TRUE(
      broken_rows(gradients[0]).nonzero().flatten().equal(torch::tensor({std::int64_t{10}})));
  EXPECT_TRUE(broken_rows(gradients[1]).slice(0, 0, 11).all().item<bool>());
  EXPECT_TRUE(broken_rows(gradients[2]).slice(0, 0, 11).all().item<bool>());
}

// oneDNN's products divide by 0 if their rows span 2 GiB. The memory between the rows is not touched.
TEST(Attention, RowsMayBeFarApart) {
  torch::manual_seed(7);
  Inputs in({1, 1, 1, 130, 130, 16});
  const Attention settings{.scale = 0.25};
  const auto want = kernels::attention(in.query, in.key, in.value, settings);
  const auto wanted = gradients_of(in, want, settings);
  const at::Tensor memory = torch::empty({130, std::int64_t{17} << 19}, torch::kBFloat16);
  const auto far_apart = [&](const at::Tensor& tensor, std::int64_t place) {
    const at::Tensor rows = memory.slice(1, 16 * place, 16 * place + 16).view({1, 1, 130, 16});
    return rows.copy_(tensor);
  };
  in.query = far_apart(in.query, 0);
  in.key = far_apart(in.key, 1);
  in.value = far_apart(in.value, 2);
  const auto got = kernels::attention(in.query, in.key, in.value, settings);
  expect_bitwise_equal(got.output, want.output);
  expect_bitwise_equal(gradients_of(in, got, settings), wanted);
}

TEST(Attention, WithoutAScoreAboveMinusInfinityTheResultIsZero) {
  torch::manual_seed(8);
  Inputs in({1, 1, 1, 20, 30, 16});
  in.query = in.query.abs();
  in.key = torch::full_like(in.key, -kInfinity);
  const Attention settings{.scale = 0.25};
  const auto got = kernels::attention(in.query, in.key, in.value, settings);
  if (!has_attention_kernel(in.query, in.key, in.value, settings)) return;  // LibTorch's softmax
  EXPECT_TRUE(got.output.eq(0).all().item<bool>());
  EXPECT_TRUE(gradients_of(in, got, settings)[2].eq(0).all().item<bool>());
}

TEST(Attention, OnlyWantedGradientsAreComputed) {
  torch::manual_seed(9);
  const Inputs in({2, 4, 2, 70, 140, 32});
  const Attention settings{.scale = 0.2, .causal = true};
  const auto result = kernels::attention(in.query, in.key, in.value, settings);
  const auto all = gradients_of(in, result, settings);
  for (const std::size_t wanted : {0U, 1U, 2U}) {
    const auto got = list_of(
        attention_gradients(in.grad, in.query, in.key, in.value, result, settings,
                            {.query = wanted == 0, .key = wanted == 1, .value = wanted == 2}));
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (i == wanted) {
        expect_bitwise_equal(got[i], all[i]);
      } else {
        EXPECT_FALSE(got[i].defined());
      }
    }
  }
}

TEST(Attention, OtherTensorsHaveNoKernel) {
  const Inputs in({1, 2, 2, 4, 4, 16});
  const Attention settings{.scale = 0.25};
  EXPECT_FALSE(has_attention_kernel(in.query.to(torch::kFloat), in.key.to(torch::kFloat),
                                    in.value.to(torch::kFloat), settings));
  EXPECT_FALSE(has_attention_kernel(in.query, in.key, in.value, {.scale = -1}));
  EXPECT_FALSE(has_attention_kernel(in.query, in.key, in.value, {.scale = double{kNan}}));
  EXPECT_FALSE(has_attention_kernel(in.query.slice(3, 0, 12), in.key.slice(3, 0, 12),
                                    in.value.slice(3, 0, 12), settings));
  EXPECT_FALSE(has_attention_kernel(in.query, in.key, in.value.slice(2, 0, 3), settings));
  EXPECT_FALSE(has_attention_kernel(in.query.slice(2, 0, 0), in.key, in.value, settings));
  for (const at::Tensor& mask : {torch::zeros({5}), torch::zeros({1, 1, 1, 4, 4}),
                                 torch::zeros({4}, torch::kHalf), torch::zeros({4}).to_sparse()})
    EXPECT_FALSE(has_attention_kernel(in.query, in.key, in.value, {.scale = 1, .mask = mask}));
}

}  // namespace
}  // namespace semitone::kernels::attention_test
