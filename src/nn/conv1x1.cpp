#include "src/nn/conv1x1.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/nn/arguments.h"
#include "src/nn/recorded_gradients.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <optional>
#include <vector>

namespace semitone::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Stride = std::array<std::int64_t, 2>;

// The elements of the input that the convolution reads.
at::Tensor every(const at::Tensor& image, Stride stride) {
  return image.slice(2, 0, image.size(2), stride[0]).slice(3, 0, image.size(3), stride[1]);
}

// (N, C, H, W) as (N * H * W, C): a view if the image is channels last without gaps.
at::Tensor rows_of(const at::Tensor& image) {
  return image.permute({0, 2, 3, 1}).reshape({-1, image.size(1)});
}

at::Tensor image_of(const at::Tensor& rows, at::IntArrayRef sizes) {
  return rows.view({sizes[0], sizes[2], sizes[3], rows.size(1)}).permute({0, 3, 1, 2});
}

at::Tensor gradient_of_input(const at::Tensor& grad, const at::Tensor& input,
                             const at::Tensor& weight, Stride stride) {
  // Here oneDNN's convolutions take as long as products.
  if (stride == Stride{1, 1}) {
    return std::get<0>(at::convolution_backward(grad, input, weight, std::nullopt, stride, {0, 0},
                                                {1, 1}, /*transposed=*/false, {0, 0}, /*groups=*/1,
                                                {true, false, false}));
  }
  const at::Tensor seen = at::mm(rows_of(grad), weight.flatten(1));
  at::Tensor result = at::zeros_like(input);
  every(result, stride).copy_(image_of(seen, grad.sizes()));
  return result;
}

at::Tensor gradient_of_weight(const at::Tensor& grad, const at::Tensor& input,
                              const at::Tensor& weight, Stride stride) {
  const at::Tensor product = at::mm(rows_of(grad).t(), rows_of(every(input, stride)));
  // The same memory for any strides of dimensions of size 1.
  return product.as_strided(weight.sizes(), weight.strides());
}

at::Tensor gradient_of_bias(const at::Tensor& grad) {
  return grad.sum({0, 2, 3}, /*keepdim=*/false, at::kFloat).to(grad.scalar_type());
}

class Conv1x1Function : public torch::autograd::Function<Conv1x1Function> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, Stride stride) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const at::Tensor shift = bias.value_or(at::Tensor());
    ctx->save_for_backward({input, weight, shift});
    save_edges(ctx, {input, weight, shift});
    ctx->saved_data["stride"] = std::vector<std::int64_t>(stride.begin(), stride.end());
    return at::conv2d(input, weight, bias, stride);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    enum Argument : std::size_t { kInput, kWeight, kBias, kArguments };
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& input = saved[kInput];
    const at::Tensor& weight = saved[kWeight];
    const at::Tensor& bias = saved[kBias];
    const auto list = ctx->saved_data["stride"].toIntVector();
    const Stride stride{list.at(0), list.at(1)};
    variable_list result;
    if (at::GradMode::is_enabled()) {  // create_graph
      result =
          recorded_gradients({input, weight, bias}, gradients[0], [&](const variable_list& in) {
            return at::conv2d(in[kInput], in[kWeight], in[kBias], stride);
          });
    } else {
      const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
      const at::Tensor& grad = gradients[0];
      result.resize(kArguments);
      if (is_needed(ctx, kInput)) result[kInput] = gradient_of_input(grad, input, weight, stride);
      if (is_needed(ctx, kWeight))
        result[kWeight] = gradient_of_weight(grad, input, weight, stride);
      if (is_needed(ctx, kBias)) result[kBias] = gradient_of_bias(grad);
    }
    result.emplace_back();  // of the stride
    return result;
  }
};

}  // namespace

bool fits_conv1x1(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  const auto dtype = input.scalar_type();
  const auto is_plain = [&](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.scalar_type() == dtype &&
           !tensor.is_neg();
  };
  return is_16bit(dtype) && is_plain(input) && input.dim() == 4 && input.numel() > 0 &&
         input.is_contiguous(at::MemoryFormat::ChannelsLast) && is_plain(weight) &&
         weight.dim() == 4 && weight.size(1) == input.size(1) && weight.size(2) == 1 &&
         weight.size(3) == 1 && weight.numel() > 0 && weight.flatten(1).is_contiguous() &&
         (!bias.defined() || (is_plain(bias) && bias.dim() == 1 && bias.numel() == weight.size(0)));
}

at::Tensor conv1x1(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                   Stride stride) {
  constexpr auto kComponent = "nn.conv1x1";
  if (!fits_conv1x1(input, weight, bias)) {
    throw Error(
        kComponent, "a 16-bit input (N, C, H, W), channels last, and a weight (K, C, 1, 1)",
        c10::str(dtype_name(input.scalar_type()), " ", input.sizes(), " of strides ",
                 input.strides(), " and ", dtype_name(weight.scalar_type()), " ", weight.sizes()));
  }
  if (stride[0] < 1 || stride[1] < 1)
    throw Error(kComponent, "a stride above 0", c10::str(at::IntArrayRef(stride)));
  return Conv1x1Function::apply(input, weight, if_defined(bias), stride);
}

}  // namespace semitone::nn
