#include "src/nn/batch_norm.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/kernels/batch_channels.h"
#include "src/kernels/batch_norm.h"
#include "src/kernels/flat.h"
#include "src/kernels/pointwise.h"
#include "src/nn/arguments.h"
#include "src/nn/batch_norm_channels.h"
#include "src/nn/kernel_reads.h"
#include "src/nn/plain.h"
#include "src/nn/recorded_gradients.h"

#include <ATen/OpMathType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check(const at::Tensor& input, const BatchNorm& layer) {
  if (!input.defined() || !input.is_floating_point() || input.layout() != at::kStrided) {
    throw Error(layer.component, "a dense floating-point input",
                !input.defined() ? "an undefined tensor"
                                 : c10::str(dtype_name(input.scalar_type()), ", ", input.layout()));
  }
  if (input.dim() < 2) {
    throw Error(layer.component, "an input (N, C, ...)", c10::str("one of shape ", input.sizes()));
  }
  for (const at::Tensor& tensor :
       {layer.weight, layer.bias, layer.running_mean, layer.running_var}) {
    if (tensor.defined() && tensor.device() != input.device()) {
      throw Error(layer.component, c10::str("parameters and buffers on ", input.device()),
                  c10::str("one on ", tensor.device()), "move layer and input to one device");
    }
    if (tensor.defined() && tensor.numel() != input.size(1)) {
      throw Error(layer.component, c10::str("an input with ", tensor.numel(), " channels"),
                  c10::str("one of shape ", input.sizes()));
    }
  }
  if (layer.residual.defined() && layer.residual.sizes() != input.sizes()) {
    throw Error(layer.component, c10::str("a residual of the input's shape ", input.sizes()),
                c10::str("one of shape ", layer.residual.sizes()));
  }
}

// The data that the backward pass needs from a layer.
struct BatchNormSettings : torch::CustomClassHolder {
  BatchNormSettings(const BatchNorm& layer, bool by_kernels_)
      : component(layer.component),
        eps(layer.eps),
        relu(layer.relu),
        has_residual(layer.residual.defined()),
        bias_dtype(layer.bias.defined() ? layer.bias.scalar_type() : at::kFloat),
        peers(layer.peers),
        by_kernels(by_kernels_) {}
  std::string_view component;
  double eps;
  bool relu;
  bool has_residual;
  at::ScalarType bias_dtype;
  std::shared_ptr<const BatchNormPeers> peers;
  bool by_kernels;  // whether CUDA's kernels computed the numbers of the channels
};

// Passes a gradient on, and is an Error if that is differentiated with respect to its inputs.
class OnceDifferentiable : public torch::autograd::Function<OnceDifferentiable> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gradient, const at::Tensor&,
                            const at::Tensor&, const std::optional<at::Tensor>&,
                            std::string_view component) {
    ctx->saved_data["where"] = std::string(component);
    return gradient.alias();
  }
  [[noreturn]] static variable_list backward(AutogradContext* ctx, const variable_list&) {
    throw Error(ctx->saved_data["where"].toStringRef(), "a layer that is differentiated once",
                "a gradient of its gradient",
                "put the layer into evaluation mode to differentiate twice");
  }
};

class BatchNormFunction : public torch::autograd::Function<BatchNormFunction> {
 public:
  // Tensors that the layer does not have are not arguments, since autograd does not support
  // undefined ones.
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& /*weight*/,
                            const std::optional<at::Tensor>& /*bias*/,
                            const std::optional<at::Tensor>& /*residual*/, const BatchNorm& layer) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const ChannelStatistics batch = channel_statistics(input, layer);
    const kernels::BatchChannels& of = batch.channels;
    at::Tensor output =
        kernels::normalize(input, of.mean, of.scale, of.shift, layer.residual, layer.relu);
    const bool again = batch.by_kernels || (layer.relu && kernels::has_batch_kernels(input));
    const auto if_again = [&](const at::Tensor& values) { return again ? values : at::Tensor(); };
    ctx->save_for_backward({input, layer.weight, of.mean, of.invstd, of.count,
                            layer.relu ? output : at::Tensor(), if_again(of.scale),
                            if_again(of.shift)});
    save_edges(ctx, {input, layer.weight, layer.bias, layer.residual});
    ctx->saved_data["settings"] =
        c10::IValue::make_capsule(c10::make_intrusive<BatchNormSettings>(layer, batch.by_kernels));
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto holder = ctx->saved_data["settings"].toCapsule();
    const auto& settings = static_cast<const BatchNormSettings&>(*holder);
    const variable_list saved = ctx->get_saved_variables();
    const bool recorded = at::GradMode::is_enabled();  // create_graph
    at::Tensor grad = gradients[0];
    // Kernels set a gradient to 0 where they read it.
    const bool fused =
        settings.relu && !recorded && needs_passes(ctx) && kernels::has_batch_kernels(saved[0]);
    if (settings.relu && !fused) {
      grad = recorded ? at::threshold_backward(grad, saved[5], 0)
                      : kernels::relu_backward(grad, saved[5]);
    }
    const kernels::ReluGradient relu{fused, settings.has_residual ? saved[5] : at::Tensor()};
    variable_list result = recorded && settings.peers == nullptr
                               ? gradients_through_libtorch(ctx, settings, saved, grad)
                               : gradients_of_arguments(ctx, settings, saved, grad, relu);
    if (recorded && settings.peers != nullptr) {
      for (at::Tensor& gradient : result) {
        if (gradient.defined()) {
          gradient = OnceDifferentiable::apply(gradient, gradients[0], saved[0],
                                               if_defined(saved[1]), settings.component);
        }
      }
    }
    result.emplace_back();  // of the layer
    return result;
  }

 private:
  // Arguments that can have a gradient, in order.
  enum Argument : std::size_t { kInput, kWeight, kBias, kResidual, kArguments };

  // Whether a gradient is needed that is more than the result's.
  static bool needs_passes(AutogradContext* ctx) {
    return is_needed(ctx, kInput) || is_needed(ctx, kWeight) || is_needed(ctx, kBias);
  }

  static variable_list gradients_of_arguments(AutogradContext* ctx,
                                              const BatchNormSettings& settings,
                                              const variable_list& saved, const at::Tensor& grad,
                                              const kernels::ReluGradient& relu) {
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor& mean = saved[2];
    const at::Tensor& invstd = saved[3];
    const at::Tensor& count = saved[4];

    variable_list result(kArguments);
    if (is_needed(ctx, kResidual)) result[kResidual] = grad;
    const bool input_needed = is_needed(ctx, kInput);
    if (!needs_passes(ctx)) return result;
    if (settings.by_kernels) {
      add_gradients_by_kernels(ctx, settings, saved, grad, relu, result);
      return result;
    }
    // Copied once, and not in each pass.
    const bool copies = kernels::has_batch_kernels(input) &&
                        grad.scalar_type() == input.scalar_type() &&
                        grad.device() == input.device();
    kernels::MaskedGradient own{
        copies ? kernels::laid_out_like(grad, input, input.scalar_type()) : grad, {}};
    kernels::BatchRelu again;  // without a residual
    if (relu.relu && relu.result.defined()) {
      own = kernels::masked_gradient(own.grad, input, mean, relu.result);
      if (is_needed(ctx, kResidual)) result[kResidual] = own.grad;
    } else {
      if (relu.relu) again = {saved[6], saved[7]};
      own.sums = kernels::gradient_sums(own.grad, input, mean, again);
    }
    const kernels::GradientSums& sums = own.sums;
    // In fp64: the engine converts them to the parameters' dtypes.
    if (is_needed(ctx, kWeight)) result[kWeight] = sums.grad_times_centred.mul(invstd);
    if (is_needed(ctx, kBias)) result[kBias] = sums.grad;
    if (input_needed) {
      kernels::GradientSums all = sums;
      if (settings.peers != nullptr) {
        at::Tensor both = at::stack({sums.grad, sums.grad_times_centred});
        settings.peers->all_reduce(both);
        all = {both[0], both[1]};
      }
      const Factors factors = factors_of(weight, invstd, all, count);
      result[kInput] = kernels::gradient_of_input(own.grad, input, mean, factors.a, factors.b,
                                                  factors.c, again.shift);
    }
    return result;
  }

  static void add_gradients_by_kernels(AutogradContext* ctx, const BatchNormSettings& settings,
                                       const variable_list& saved, const at::Tensor& grad,
                                       const kernels::ReluGradient& relu, variable_list& result) {
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const kernels::BatchChannels channels{.count = saved[4],
                                          .invstd = saved[3],
                                          .mean = saved[2],
                                          .scale = saved[6],
                                          .shift = saved[7]};
    const auto gradient = kernels::gradient_parts(grad, input, channels, relu);
    if (is_needed(ctx, kResidual)) result[kResidual] = gradient.grad;
    const auto fp32 = channels.mean.options();
    if (is_needed(ctx, kWeight))
      result[kWeight] = at::empty(weight.sizes(), fp32.dtype(weight.scalar_type()));
    if (is_needed(ctx, kBias))
      result[kBias] = at::empty(channels.mean.sizes(), fp32.dtype(settings.bias_dtype));
    const kernels::ParameterGradients own{result[kWeight], result[kBias]};
    kernels::InputFactors factors;
    if (settings.peers == nullptr) {
      factors = kernels::input_factors(gradient.parts, weight, channels, own);
    } else {
      at::Tensor sums = kernels::joined_gradients(gradient.parts, channels, own);
      if (!is_needed(ctx, kInput)) return;
      settings.peers->all_reduce(sums);
      factors = kernels::input_factors(sums.unsqueeze(0), weight, channels, {});
    }
    if (is_needed(ctx, kInput))
      result[kInput] = kernels::gradient_of_input(gradient, input, channels, factors);
  }

  static variable_list gradients_through_libtorch(AutogradContext* ctx,
                                                  const BatchNormSettings& settings,
                                                  const variable_list& saved,
                                                  const at::Tensor& grad) {
    const at::Tensor& input = saved[0];
    const auto dtype = at::promote_types(input.scalar_type(), at::kFloat);
    // The gradients of summands do not depend on their values.
    const auto stand_in = [&](Argument argument, at::IntArrayRef shape) {
      return is_needed(ctx, argument)
                 ? at::zeros(shape, input.options().dtype(dtype)).requires_grad_()
                 : at::Tensor();
    };
    const at::Tensor bias = stand_in(kBias, saved[2].sizes());
    const at::Tensor residual = stand_in(kResidual, input.sizes());
    const auto definition = [&](const variable_list& in) {
      enum { kX, kFactors, kShift, kSummand };
      const at::Tensor weight = in[kFactors].defined() ? in[kFactors].to(dtype) : at::Tensor();
      const at::Tensor normal =
          at::batch_norm(in[kX].to(dtype), weight, in[kShift], {}, {}, /*training=*/true, 0,
                         settings.eps, /*cudnn_enabled=*/false);
      return (in[kSummand].defined() ? normal.add(in[kSummand]) : normal).to(input.scalar_type());
    };
    return recorded_gradients({input, saved[1], bias, residual}, grad, definition);
  }
};

// With parameters and statistics in a dtype that LibTorch's operator takes for this input.
at::Tensor through_libtorch(const at::Tensor& input, const BatchNorm& layer, bool training) {
  const auto dtype = at::toOpMathType(input.scalar_type());
  const auto converted = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(dtype) : tensor;
  };
  const at::Tensor mean = converted(layer.running_mean);
  const at::Tensor variance = converted(layer.running_var);
  at::Tensor result =
      at::batch_norm(input, converted(layer.weight), converted(layer.bias), mean, variance,
                     training, layer.momentum, layer.eps, at::globalContext().userEnabledCuDNN());
  if (training) {
    if (!mean.is_same(layer.running_mean)) layer.running_mean.copy_(mean);
    if (!variance.is_same(layer.running_var)) layer.running_var.copy_(variance);
  }
  if (layer.residual.defined()) result = (result + layer.residual).to(input.scalar_type());
  return layer.relu ? result.relu() : result;
}

}  // namespace

at::Tensor batch_norm(const at::Tensor& input, const BatchNorm& layer) {
  check(input, layer);
  if (!are_plain(input, layer.weight, layer.bias, layer.residual)) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    if (layer.peers == nullptr) return through_libtorch(input, layer, /*training=*/true);
    throw Error(layer.component, "plain tensors in training with several processes",
                "a call in a trace, a forward-mode derivative, or vmap",
                "trace the layer in evaluation");
  }
  note_kernel_reads(input, layer.weight, layer.bias, layer.residual);
  return BatchNormFunction::apply(input, if_defined(layer.weight), if_defined(layer.bias),
                                  if_defined(layer.residual), layer);
}

at::Tensor batch_norm_in_evaluation(const at::Tensor& input, const BatchNorm& layer) {
  check(input, layer);
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  return through_libtorch(input, layer, /*training=*/false);
}

}  // namespace semitone::nn
