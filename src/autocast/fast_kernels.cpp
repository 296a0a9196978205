#include "src/autocast/fast_kernels.h"

#include "semitone/nn/fused_cross_entropy.h"
#include "semitone/nn/fused_dropout.h"
#include "semitone/nn/fused_gelu.h"
#include "semitone/nn/fused_layer_norm.h"
#include "semitone/nn/fused_rms_norm.h"
#include "src/kernels/on_cuda.h"
#include "src/kernels/pointwise.h"
#include "src/nn/attention.h"
#include "src/nn/batch_norm.h"
#include "src/nn/batch_norm_mark.h"
#include "src/nn/conv1x1.h"
#include "src/nn/max_pool.h"
#include "src/nn/new_dropout.h"
#include "src/nn/pointwise.h"

#include <ATen/Context.h>
#include <ATen/InferSize.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Reduction.h>
#include <torch/enum.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

namespace semitone::amp {
namespace {

using Arguments = std::span<const c10::IValue>;

at::Tensor tensor_or_none(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

bool is_suitable(const at::Tensor& input) {
  return kernels::has_kernels(input) && input.layout() == at::kStrided &&
         input.is_floating_point() && input.scalar_type() != at::kDouble && input.numel() > 0;
}

// Whether a weight or bias matches this input.
bool fits(const at::Tensor& values, const at::Tensor& input) {
  return !values.defined() ||
         (kernels::same_device(values, input) && values.layout() == at::kStrided &&
          values.is_floating_point() && values.scalar_type() != at::kDouble &&
          (values.scalar_type() == at::kFloat || values.scalar_type() == input.scalar_type()));
}

std::optional<at::Tensor> batch_norm(Arguments arguments) {
  enum { kInput, kWeight, kBias, kRunningMean, kRunningVar, kTraining, kMomentum, kEps };
  const at::Tensor& input = arguments[kInput].toTensor();
  if (!arguments[kTraining].toBool() || !is_suitable(input) || input.dim() < 2 ||
      input.numel() <= input.size(1))
    return std::nullopt;
  const nn::BatchNorm layer{.component = "batch_norm",
                            .weight = tensor_or_none(arguments[kWeight]),
                            .bias = tensor_or_none(arguments[kBias]),
                            .running_mean = tensor_or_none(arguments[kRunningMean]),
                            .running_var = tensor_or_none(arguments[kRunningVar]),
                            .momentum = arguments[kMomentum].toDouble(),
                            .eps = arguments[kEps].toDouble()};
  // LibTorch's operator, which reads the mark, is parallel's.
  for (const at::Tensor& tensor : {layer.weight, layer.running_mean}) {
    if (nn::batch_norm_mark(tensor) != nullptr) return std::nullopt;
  }
  for (const at::Tensor& values :
       {layer.weight, layer.bias, layer.running_mean, layer.running_var}) {
    if (!fits(values, input)) return std::nullopt;
  }
  // LibTorch's result has no other order of elements: view() may follow.
  const bool is_in_order =
      input.is_contiguous() ||
      (input.dim() == 4 && input.is_contiguous(at::MemoryFormat::ChannelsLast)) ||
      (input.dim() == 5 && input.is_contiguous(at::MemoryFormat::ChannelsLast3d));
  return nn::batch_norm(is_in_order ? input : input.contiguous(input.suggest_memory_format()),
                        layer);
}

std::optional<at::Tensor> dropout(Arguments arguments) {
  enum { kInput, kProbability, kTrain };
  const at::Tensor& input = arguments[kInput].toTensor();
  if (!arguments[kTrain].toBool() || !is_suitable(input)) return std::nullopt;
  return nn::fused_dropout(input, arguments[kProbability].toDouble());
}

// LibTorch's 16-bit kernels go through fp32, at half the speed of memory. Below this number of
// elements that costs less than recording a function of Semitone's, 4 us.
bool is_worth_a_kernel(const at::Tensor& input) {
  constexpr std::int64_t kElements = 64 * 1024;
  return input.numel() >= kElements && input.element_size() == 2 &&
         kernels::has_pointwise_kernel(input);
}

// LibTorch tracks views that are written to, and refuses writes to leaves before the kernel runs.
bool is_writable(const at::Tensor& input) {
  const bool is_refused = at::GradMode::is_enabled() && input.is_leaf() && input.requires_grad();
  return is_worth_a_kernel(input) && !input.is_view() && !input.is_inference() && !is_refused;
}

std::optional<at::Tensor> relu(Arguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  if (!is_worth_a_kernel(input)) return std::nullopt;
  return nn::relu(input);
}

std::optional<at::Tensor> relu_(Arguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  if (!is_writable(input)) return std::nullopt;
  return nn::relu_(input);
}

// Whether these are two tensors of the same memory layout, and nothing else.
bool is_plain_sum(Arguments arguments) {
  enum { kSelf, kOther, kAlpha };
  const at::Tensor& self = arguments[kSelf].toTensor();
  const at::Tensor& other = arguments[kOther].toTensor();
  return other.layout() == at::kStrided && other.is_cpu() && other.sizes() == self.sizes() &&
         other.strides() == self.strides() && other.scalar_type() == self.scalar_type() &&
         at::get_overlap_status(self, other) != at::MemOverlapStatus::Partial &&
         arguments[kAlpha].toScalar().equal(1);
}

std::optional<at::Tensor> add(Arguments arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  if (!is_worth_a_kernel(self) || !is_plain_sum(arguments)) return std::nullopt;
  return nn::add(self, arguments[1].toTensor());
}

std::optional<at::Tensor> add_(Arguments arguments) {
  const at::Tensor& self = arguments[0].toTensor();
  if (!is_writable(self) || !is_plain_sum(arguments)) return std::nullopt;
  return nn::add_(self, arguments[1].toTensor());
}

std::optional<at::Tensor> gelu(Arguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  if (!is_suitable(input)) return std::nullopt;
  return nn::fused_gelu(input, arguments[1].toStringView());
}

// A list of sizes; nothing if one of them is symbolic.
std::optional<std::vector<std::int64_t>> sizes_of(const c10::IValue& value) {
  return value.isIntList() ? std::optional(value.toIntVector()) : std::nullopt;
}

std::optional<at::Tensor> layer_norm(Arguments arguments) {
  enum { kInput, kShape, kWeight, kBias, kEps };
  const at::Tensor& input = arguments[kInput].toTensor();
  const at::Tensor weight = tensor_or_none(arguments[kWeight]);
  const at::Tensor bias = tensor_or_none(arguments[kBias]);
  const auto shape = sizes_of(arguments[kShape]);
  if (!shape.has_value() || !is_suitable(input) || !fits(weight, input) || !fits(bias, input))
    return std::nullopt;
  return nn::fused_layer_norm(input, *shape, weight, bias, arguments[kEps].toDouble());
}

std::optional<at::Tensor> rms_norm(Arguments arguments) {
  enum { kInput, kShape, kWeight, kEps };
  const at::Tensor& input = arguments[kInput].toTensor();
  const at::Tensor weight = tensor_or_none(arguments[kWeight]);
  const auto shape = sizes_of(arguments[kShape]);
  if (!shape.has_value() || !is_suitable(input) || !fits(weight, input)) return std::nullopt;
  return nn::fused_rms_norm(input, *shape, weight, arguments[kEps].toOptional<double>());
}

// Values for height and width; a single one stands for both.
std::optional<std::array<std::int64_t, 2>> pair_of(const c10::IValue& value) {
  const auto sizes = sizes_of(value);
  if (!sizes.has_value() || sizes->empty() || sizes->size() > 2) return std::nullopt;
  return std::array{sizes->front(), sizes->back()};
}

std::optional<at::Tensor> max_pool2d(Arguments arguments) {
  enum { kInput, kKernel, kStride, kPadding, kDilation, kCeilMode };
  // Fewer channels would leave vectors half empty.
  constexpr std::int64_t kChannels = 8;
  const at::Tensor& input = arguments[kInput].toTensor();
  const auto stride = sizes_of(arguments[kStride]);
  const bool one_kernel_apart = stride.has_value() && stride->empty();
  const auto kernel = pair_of(arguments[kKernel]);
  const auto step = pair_of(arguments[one_kernel_apart ? kKernel : kStride]);
  const auto padding = pair_of(arguments[kPadding]);
  const auto dilation = pair_of(arguments[kDilation]);
  if (!kernel.has_value() || !step.has_value() || !padding.has_value() ||
      dilation != std::array<std::int64_t, 2>{1, 1} || arguments[kCeilMode].toBool())
    return std::nullopt;
  const kernels::MaxPool pool{.kernel = *kernel, .stride = *step, .padding = *padding};
  if (!is_suitable(input) || !kernels::has_max_pool_kernel(input, pool) ||
      input.size(1) < kChannels)
    return std::nullopt;
  return nn::max_pool2d(input, pool);
}

// For calls that need a gradient; the forward pass is LibTorch's.
std::optional<at::Tensor> conv2d(Arguments arguments) {
  enum { kInput, kWeight, kBias, kStride, kPadding, kDilation, kGroups };
  constexpr std::int64_t kElements = 64 * 1024;
  const at::Tensor& input = arguments[kInput].toTensor();
  const at::Tensor& weight = arguments[kWeight].toTensor();
  const at::Tensor bias = tensor_or_none(arguments[kBias]);
  if (!at::GradMode::is_enabled() || !(input.requires_grad() || weight.requires_grad()) ||
      input.numel() < kElements || arguments[kGroups].toInt() != 1 ||
      pair_of(arguments[kPadding]) != std::array<std::int64_t, 2>{0, 0} ||
      !nn::fits_conv1x1(input, weight, bias))
    return std::nullopt;
  const auto stride = pair_of(arguments[kStride]);
  if (!stride.has_value() || (*stride)[0] < 1 || (*stride)[1] < 1) return std::nullopt;
  return nn::conv1x1(input, weight, bias, *stride);
}

std::optional<at::Tensor> cross_entropy_loss(Arguments arguments) {
  enum { kLogits, kTarget, kWeight, kReduction, kIgnoreIndex, kLabelSmoothing };
  const at::Tensor& logits = arguments[kLogits].toTensor();
  const at::Tensor& target = arguments[kTarget].toTensor();
  if (arguments[kWeight].isTensor() || !is_suitable(logits) || logits.dim() != 2 ||
      target.dim() != 1 || target.scalar_type() != at::kLong ||
      !kernels::same_device(target, logits))
    return std::nullopt;
  nn::FusedCrossEntropyOptions options;
  options.ignore_index(arguments[kIgnoreIndex].toInt())
      .label_smoothing(arguments[kLabelSmoothing].toDouble());
  switch (arguments[kReduction].toInt()) {
    case at::Reduction::None:
      options.reduction(torch::kNone);
      break;
    case at::Reduction::Sum:
      options.reduction(torch::kSum);
      break;
    default:
      options.reduction(torch::kMean);
  }
  return nn::fused_cross_entropy(logits, target, options);
}

// Attention of tensors with at least two dimensions.
struct AttentionCall {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  at::Tensor mask;  // bools, or numbers to add; undefined if none
  double scale;
  bool is_causal;
};

// Of the dtypes and dimensions that LibTorch accepts.
bool is_mask_for(const at::Tensor& mask, const at::Tensor& query) {
  const auto dtype = mask.scalar_type();
  return mask.is_cpu() && mask.layout() == at::kStrided && mask.dim() >= 2 &&
         (dtype == at::kBool || dtype == at::kFloat || dtype == query.scalar_type());
}

bool needs_gradient(const at::Tensor& tensor) {
  return tensor.defined() && at::GradMode::is_enabled() && tensor.requires_grad();
}

// LibTorch has no fused attention with dropout on a CPU. It composes these operators, and its dropout
// takes as long as the products.
std::optional<at::Tensor> attention_with_dropout(const AttentionCall& call, double p) {
  const auto dtype = call.query.scalar_type();
  if (call.key.scalar_type() != dtype || call.value.scalar_type() != dtype) return std::nullopt;
  // Scaled before the product, which may overflow fp16.
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  at::Tensor scores = at::matmul(call.query.mul(call.scale), call.key.transpose(-2, -1));
  if (call.is_causal) {
    const at::Tensor later = at::ones({scores.size(-2), scores.size(-1)}, at::kBool).triu(1);
    scores.masked_fill_(later, -kInfinity);
  }
  if (!call.mask.defined())
    return at::matmul(nn::fused_dropout(at::softmax(scores, -1), p), call.value);
  if (call.mask.scalar_type() == at::kBool) {
    scores.masked_fill_(call.mask.logical_not(), -kInfinity);
  } else {
    scores.add_(call.mask);
  }
  return at::matmul(nn::fused_dropout(at::_safe_softmax(scores, -1), p), call.value);
}

std::optional<at::Tensor> attention(Arguments arguments) {
  enum { kQuery, kKey, kValue, kMask, kDropout, kCausal, kScale, kGrouped };
  const at::Tensor& query = arguments[kQuery].toTensor();
  if (!is_suitable(query) || query.dim() < 2) return std::nullopt;
  const AttentionCall call{.query = query,
                           .key = arguments[kKey].toTensor(),
                           .value = arguments[kValue].toTensor(),
                           .mask = tensor_or_none(arguments[kMask]),
                           .scale = arguments[kScale].isNone()
                                        ? 1 / std::sqrt(static_cast<double>(query.size(-1)))
                                        : arguments[kScale].toDouble(),
                           .is_causal = arguments[kCausal].toBool()};
  const double p = arguments[kDropout].toDouble();
  const bool is_grouped = arguments[kGrouped].toBool();
  // LibTorch refuses these.
  if (!(p >= 0 && p <= 1) || call.key.dim() < 2 || call.value.dim() < 2) return std::nullopt;
  if (call.mask.defined() && (call.is_causal || !is_mask_for(call.mask, query)))
    return std::nullopt;
  kernels::Attention settings{.scale = call.scale, .causal = call.is_causal, .mask = call.mask};
  if (!needs_gradient(call.mask) && at::globalContext().userEnabledFlashSDP() &&
      kernels::has_attention_kernel(query, call.key, call.value, settings) &&
      // Without grouped queries LibTorch refuses other numbers of heads.
      (is_grouped || call.key.size(1) == query.size(1))) {
    if (p > 0) settings.dropout = nn::new_dropout(p);
    return nn::attention(query, call.key, call.value, settings);
  }
  return p > 0 && !is_grouped ? attention_with_dropout(call, p) : std::nullopt;
}

// A model may view a tensor that initialize made channels last. Where LibTorch would raise, this
// copies.
std::optional<at::Tensor> view(Arguments arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const auto sizes = sizes_of(arguments[1]);
  if (!sizes.has_value() || input.layout() != at::kStrided || input.dim() != 4 ||
      input.is_contiguous() || !input.is_contiguous(at::MemoryFormat::ChannelsLast))
    return std::nullopt;
  const auto wanted = at::infer_size_dv(*sizes, input.numel());
  if (at::detail::computeStride(input.sizes(), input.strides(), wanted).has_value())
    return std::nullopt;
  return input.contiguous().view(wanted);
}

constexpr auto kAlsoOnGpu = FastKernel::On::cpu_and_gpu;

constexpr std::array<FastKernel, 14> kKernels{{
    {.op = "add.Tensor", .run = add},
    {.op = "add_.Tensor", .run = add_},
    {.op = "batch_norm", .run = batch_norm, .on = kAlsoOnGpu},
    {.op = "conv2d", .run = conv2d},
    {.op = "cross_entropy_loss", .run = cross_entropy_loss, .widens = true, .on = kAlsoOnGpu},
    {.op = "dropout", .run = dropout},
    {.op = "gelu", .run = gelu, .on = kAlsoOnGpu},
    {.op = "layer_norm", .run = layer_norm, .on = kAlsoOnGpu},
    {.op = "max_pool2d", .run = max_pool2d},
    {.op = "relu", .run = relu},
    {.op = "relu_", .run = relu_},
    {.op = "rms_norm", .run = rms_norm, .on = kAlsoOnGpu},
    {.op = "scaled_dot_product_attention", .run = attention},
    {.op = "view", .run = view, .on = FastKernel::On::every_device},
}};

}  // namespace

std::span<const FastKernel> fast_kernels() {
  return kKernels;
}

const FastKernel* find_fast_kernel(std::string_view op) {
  const auto found = std::find_if(kKernels.begin(), kKernels.end(),
                                  [&](const FastKernel& kernel) { return kernel.op == op; });
  return found == kKernels.end() ? nullptr : &*found;
}

}  // namespace semitone::amp
