#include "src/nn/layer_norm.h"

#include "semitone/core/error.h"
#include "src/kernels/layer_norm.h"
#include "src/nn/arguments.h"
#include "src/nn/checks.h"
#include "src/nn/kernel_reads.h"
#include "src/nn/plain.h"
#include "src/nn/recorded_gradients.h"

#include <ATen/OpMathType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <optional>
#include <string>

namespace semitone::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check(const at::Tensor& input, const LayerNormParameters& layer) {
  check_input(layer.component, input);
  const auto shape = layer.normalized_shape;
  if (shape.empty())
    throw Error(layer.component, "a normalized_shape of 1 dimension or more", "none");
  if (input.sizes().size() < shape.size() ||
      input.sizes().slice(input.sizes().size() - shape.size()) != shape) {
    throw Error(layer.component, c10::str("an input (..., ", shape, ")"),
                c10::str("one of shape ", input.sizes()));
  }
  check_values(layer.component, "weight", layer.weight, input, shape);
  check_values(layer.component, "bias", layer.bias, input, shape);
}

class LayerNormFunction : public torch::autograd::Function<LayerNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& /*weight*/,
                            const std::optional<at::Tensor>& /*bias*/,
                            const kernels::LayerNorm& norm) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const auto rows = kernels::layer_norm(input, norm, /*with_statistics=*/true);
    ctx->save_for_backward({input, norm.weight, norm.bias, rows.mean, rows.rstd});
    save_edges(ctx, {input, norm.weight, norm.bias});
    ctx->saved_data["columns"] = norm.columns;
    ctx->saved_data["centred"] = norm.centred;
    ctx->saved_data["eps"] = norm.eps;
    return rows.output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& input = saved[kInput];
    const kernels::LayerNorm norm{.columns = ctx->saved_data["columns"].toInt(),
                                  .centred = ctx->saved_data["centred"].toBool(),
                                  .eps = ctx->saved_data["eps"].toDouble(),
                                  .weight = saved[kWeight],
                                  .bias = saved[kBias]};
    const at::Tensor& grad = gradients[0];
    variable_list result;
    if (at::GradMode::is_enabled()) {  // create_graph
      result =
          recorded_gradients({input, norm.weight, norm.bias}, grad, [&](const variable_list& in) {
            kernels::LayerNorm recorded = norm;
            recorded.weight = in[kWeight];
            recorded.bias = in[kBias];
            return kernels::ref::layer_norm(in[kInput], recorded).output;
          });
    } else {
      const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
      auto rows =
          kernels::layer_norm_backward(grad, input, saved[kArguments], saved[kArguments + 1], norm,
                                       {.input = is_needed(ctx, kInput),
                                        .weight = is_needed(ctx, kWeight),
                                        .bias = is_needed(ctx, kBias)});
      result = {rows.input, rows.weight, rows.bias};
    }
    result.emplace_back();  // of the settings
    return result;
  }

 private:
  // Arguments that can have a gradient, in order, followed by other saved tensors.
  enum Argument : std::size_t { kInput, kWeight, kBias, kArguments };
};

// For tensors that the kernel cannot read.
at::Tensor through_libtorch(const at::Tensor& input, const LayerNormParameters& layer) {
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  const auto dtype = at::toOpMathType(input.scalar_type());
  const auto converted = [&](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor.to(dtype)) : std::nullopt;
  };
  const at::Tensor x = input.to(dtype);
  const at::Tensor result =
      layer.centred ? at::layer_norm(x, layer.normalized_shape, converted(layer.weight),
                                     converted(layer.bias), layer.eps)
                    : at::rms_norm(x, layer.normalized_shape, converted(layer.weight), layer.eps);
  return result.to(input.scalar_type());
}

}  // namespace

at::Tensor layer_norm(const at::Tensor& input, const LayerNormParameters& layer) {
  check(input, layer);
  if (!are_plain(input, layer.weight, layer.bias)) return through_libtorch(input, layer);
  note_kernel_reads(input, layer.weight, layer.bias);
  const kernels::LayerNorm norm{.columns = c10::multiply_integers(layer.normalized_shape),
                                .centred = layer.centred,
                                .eps = layer.eps,
                                .weight = layer.weight,
                                .bias = layer.bias};
  if (is_recorded({input, norm.weight, norm.bias}))
    return LayerNormFunction::apply(input, if_defined(norm.weight), if_defined(norm.bias), norm);
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  return kernels::layer_norm(input, norm, /*with_statistics=*/false).output;
}

}  // namespace semitone::nn
