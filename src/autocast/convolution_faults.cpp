#include "src/autocast/convolution_faults.h"

#include "src/autocast/convolution_arguments.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

using Arguments = std::span<const c10::IValue>;
using Sizes = std::vector<std::int64_t>;

using Place = ConvolutionPlace;
using PlainPlace = PlainConvolutionPlace;
using TransposedPlace = TransposedConvolutionPlace;

// Small integers are exact in every dtype, so any difference is an error rather than rounding.
at::Tensor small_integers(at::IntArrayRef shape) {
  return torch::arange(c10::multiply_integers(shape), at::kFloat).remainder(5).sub_(2).view(shape);
}

bool trial_convolution_is_wrong(c10::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  const at::Tensor input = small_integers({1, 8, 13});
  const at::Tensor weight = small_integers({16, 8, 8});
  const at::Tensor got = at::conv1d(input.to(dtype), weight.to(dtype)).to(at::kFloat);
  return !at::equal(got, at::conv1d(input, weight));
}

// The values for the dimensions of the image; a single one stands for all.
std::optional<Sizes> per_dimension(const c10::IValue& value, std::size_t dimensions) {
  if (!value.isIntList()) return std::nullopt;
  Sizes values = value.toIntVector();
  if (values.size() == 1) values.resize(dimensions, values.front());
  return values.size() == dimensions ? std::optional(std::move(values)) : std::nullopt;
}

// That of the beginning, where it is a word: "same", which has stride 1, puts the odd element at
// the end.
std::optional<Sizes> padding_of(const c10::IValue& value, const at::Tensor& weight,
                                const Sizes& dilation) {
  const std::size_t dimensions = dilation.size();
  if (!value.isString()) return per_dimension(value, dimensions);
  Sizes padding(dimensions, 0);
  if (value.toStringRef() != "same") return padding;
  for (std::size_t i = 0; i < dimensions; ++i)
    padding[i] = dilation[i] * (weight.size(static_cast<std::int64_t>(i) + 2) - 1) / 2;
  return padding;
}

bool wants_gradient(const at::Tensor& tensor) {
  return c10::GradMode::is_enabled() && tensor.requires_grad();
}

// One dimension of a convolution. A transposed one is seen as the convolution whose gradient it is,
// from its output to its input.
struct Line {
  std::int64_t from;  // the image's size
  std::int64_t to;    // the result's
  std::int64_t kernel;
  std::int64_t stride;
  std::int64_t padding;
  std::int64_t dilation;

  std::int64_t reach() const { return dilation * (kernel - 1) + 1; }
  bool meet(std::int64_t element, std::int64_t result) const {
    const std::int64_t place = result * stride + element * dilation - padding;
    return 0 <= place && place < from;
  }
  // Whether an element of the kernel meets nothing but padding.
  bool has_idle_element() const {
    for (std::int64_t element = 0; element < kernel; ++element) {
      const std::int64_t before = padding - element * dilation;
      const std::int64_t first = before > 0 ? (before + stride - 1) / stride : 0;
      if (first >= to || !meet(element, first)) return true;
    }
    return false;
  }
  // Whether a result does. Those between the edges meet the image with the first element.
  bool has_idle_result() const {
    const auto is_idle = [&](std::int64_t result) {
      std::int64_t element = 0;
      while (element < kernel && !meet(element, result)) ++element;
      return element == kernel;
    };
    for (std::int64_t result = 0; result < to && result * stride < padding; ++result)
      if (is_idle(result)) return true;
    for (std::int64_t result = to - 1; result >= 0 && result * stride - padding >= from; --result)
      if (is_idle(result)) return true;
    return false;
  }
};

// On a CPU, of a batch or a single image.
struct Convolution {
  at::Tensor input;
  at::Tensor weight;
  bool is_transposed = false;
  std::int64_t groups = 1;
  std::vector<Line> lines;

  bool has_stride() const {
    return std::any_of(lines.begin(), lines.end(),
                       [](const Line& line) { return line.stride > 1; });
  }
  bool has_idle_element() const {
    return std::any_of(lines.begin(), lines.end(), std::mem_fn(&Line::has_idle_element));
  }
  bool has_idle_result() const {
    return std::any_of(lines.begin(), lines.end(), std::mem_fn(&Line::has_idle_result));
  }
};

// Nothing if the arguments are not as usual, or wrong: that is LibTorch's to say.
std::optional<Convolution> convolution_of(const MatrixProduct& product, Arguments arguments) {
  if (!arguments[Place::kInput].isTensor() || !arguments[Place::kWeight].isTensor())
    return std::nullopt;
  Convolution found;
  found.input = arguments[Place::kInput].toTensor();
  found.weight = arguments[Place::kWeight].toTensor();
  if (!found.input.defined() || !found.weight.defined() || !found.weight.is_cpu() ||
      found.weight.dim() < 3 || found.input.dim() < found.weight.dim() - 1)
    return std::nullopt;
  const bool is_plain = product.is_convolution();
  const bool has_flag = is_plain && arguments[PlainPlace::kTransposed].isBool();
  found.is_transposed = !is_plain || (has_flag && arguments[PlainPlace::kTransposed].toBool());
  const c10::IValue& groups =
      arguments[has_flag ? PlainPlace::kGroupsAfterTransposed : PlainPlace::kGroups];
  const auto count = static_cast<std::size_t>(found.weight.dim() - 2);
  const auto stride = per_dimension(arguments[Place::kStride], count);
  const auto dilation = per_dimension(
      arguments[is_plain ? PlainPlace::kDilation : TransposedPlace::kDilation], count);
  if (!dilation.has_value()) return std::nullopt;
  const auto padding = padding_of(arguments[Place::kPadding], found.weight, *dilation);
  const auto more =
      found.is_transposed
          ? per_dimension(
                arguments[is_plain ? PlainPlace::kOutputPadding : TransposedPlace::kOutputPadding],
                count)
          : Sizes(count, 0);
  if (!groups.isInt() || !stride.has_value() || !padding.has_value() || !more.has_value())
    return std::nullopt;
  found.groups = groups.toInt();
  for (std::size_t i = 0; i < count; ++i) {
    const auto from_end = static_cast<std::int64_t>(i) - static_cast<std::int64_t>(count);
    const std::int64_t size = found.input.size(from_end);
    Line line{size, size, found.weight.size(from_end), (*stride)[i], (*padding)[i], (*dilation)[i]};
    if (line.stride < 1) return std::nullopt;
    if (found.is_transposed) {
      line.from = (size - 1) * line.stride - 2 * line.padding + line.reach() + (*more)[i];
    } else if (!arguments[Place::kPadding].isString() ||
               arguments[Place::kPadding].toStringRef() != "same") {
      line.to = (size + 2 * line.padding - line.reach()) / line.stride + 1;
    }
    found.lines.push_back(line);
  }
  return found;
}

// With the strides of a contiguous tensor, also where dimensions of size 1 would allow others.
at::Tensor plain(const at::Tensor& tensor) {
  return tensor.reshape(-1).view(tensor.sizes());
}

bool is_channels_last(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         value.toTensor().suggest_memory_format() != at::MemoryFormat::Contiguous;
}

}  // namespace

bool convolves_wrongly(const at::Tensor& weight, c10::ScalarType dtype) {
  if (weight.dim() < 3 || weight.device().type() != c10::DeviceType::CPU) return false;
  const std::int64_t channels = weight.size(1);
  const std::int64_t row = channels * weight.size(-1);
  if (channels >= 16 || channels % 2 != 0 || row % 32 != 0 || row <= 32) return false;
  static const bool wrong_in_bf16 = trial_convolution_is_wrong(at::kBFloat16);
  static const bool wrong_in_fp16 = trial_convolution_is_wrong(at::kHalf);
  return dtype == at::kHalf ? wrong_in_fp16 : dtype == at::kBFloat16 && wrong_in_bf16;
}

bool may_be_wrong(const MatrixProduct& product, Arguments arguments) {
  const auto convolution = convolution_of(product, arguments);
  if (!convolution.has_value()) return false;
  const Line& last = convolution->lines.back();
  if (convolution->groups > 1 && convolution->weight.size(1) == 1 && last.to == 1 &&
      last.stride > 1)
    return true;
  const bool wanted = wants_gradient(convolution->input) || wants_gradient(convolution->weight);
  return (wanted && convolution->has_stride() && convolution->has_idle_element()) ||
         convolution->has_idle_result();
}

void avoid_faults(const MatrixProduct& product, std::span<c10::IValue> arguments) {
  constexpr std::int64_t kChannels = 16;
  // If one of them is, LibTorch computes in channels last.
  if (!is_channels_last(arguments[Place::kInput]) && !is_channels_last(arguments[Place::kWeight]))
    return;
  const auto convolution = convolution_of(product, arguments);
  if (!convolution.has_value()) return;
  const auto& lines = convolution->lines;
  const auto is_point = [](const Line& line) { return line.kernel == 1 && line.padding == 0; };
  if (convolution->has_idle_result()) {
    for (const std::size_t place : {Place::kInput, Place::kWeight}) {
      if (is_channels_last(arguments[place])) arguments[place] = plain(arguments[place].toTensor());
    }
  } else if (!convolution->is_transposed && convolution->weight.size(1) < kChannels &&
             convolution->has_stride() && std::all_of(lines.begin(), lines.end(), is_point) &&
             wants_gradient(convolution->weight)) {
    at::Tensor read = convolution->input;
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const auto from_end = static_cast<std::int64_t>(i) - static_cast<std::int64_t>(lines.size());
      read = read.slice(from_end, 0, std::nullopt, lines[i].stride);
    }
    arguments[Place::kInput] = read;
    arguments[Place::kStride] = Sizes(lines.size(), 1);
  }
}

}  // namespace semitone::amp
