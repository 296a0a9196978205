#include "src/nn/batch_norm.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/kernels/batch_norm.h"
#include "src/kernels/pointwise.h"
#include "src/nn/arguments.h"
#include "src/nn/recorded_gradients.h"

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

// The statistics of the batches of all processes. Per channel, fp64; count has one element, and
// stays on the device.
struct Statistics {
  at::Tensor mean;
  at::Tensor variance;  // biased
  at::Tensor count;
};

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

// Chan, Golub and LeVeque: deviations from the common mean, weighted by each process's count.
Statistics gather_statistics(const at::Tensor& input, const BatchNormPeers* peers) {
  const std::int64_t channels = input.size(1);
  const auto own = kernels::moments(input);
  const at::Tensor own_count =
      at::full({1}, channels == 0 ? 0 : input.numel() / channels, own.mean.options());
  if (peers == nullptr) {
    const auto rows = std::max<std::int64_t>(1, channels == 0 ? 1 : input.numel() / channels);
    return {own.mean, own.m2.div(static_cast<double>(rows)), own_count};
  }
  const at::Tensor all = peers->all_gather(at::cat({own.mean, own.m2, own_count}));
  const at::Tensor means = all.narrow(1, 0, channels);
  const at::Tensor m2s = all.narrow(1, channels, channels);
  const at::Tensor counts = all.narrow(1, 2 * channels, 1);

  const at::Tensor count = counts.sum(0);
  const at::Tensor divisor = count.clamp_min(1);
  const at::Tensor mean = means.mul(counts).sum(0).div_(divisor);
  const at::Tensor m2 = m2s.add(means.sub(mean).square_().mul_(counts)).sum(0);
  return {mean, m2.div(divisor), count};
}

// On the CPU, a loop over channels: each ATen operator takes 1 to 2 us for any size, and a layer
// would need 50 of them.
class Loop {
 public:
  explicit Loop(const at::Tensor& channels) : like_(channels) {}

  // fp64 values, or `otherwise` if the layer has none.
  class Values {
   public:
    Values(const at::Tensor& tensor, double otherwise)
        : fp64_(tensor.defined() ? tensor.to(at::kDouble).contiguous() : tensor),
          data_(tensor.defined() ? fp64_.const_data_ptr<double>() : nullptr),
          otherwise_(otherwise) {}
    double operator[](std::int64_t channel) const {
      return data_ == nullptr ? otherwise_ : data_[channel];
    }

   private:
    at::Tensor fp64_;
    const double* data_;
    double otherwise_;
  };

  // value(channel) of each channel.
  template <typename Value>
  at::Tensor operator()(const Value& value) const {
    at::Tensor result = at::empty_like(like_);
    auto* const data = result.mutable_data_ptr<double>();
    for (std::int64_t channel = 0; channel < result.numel(); ++channel)
      data[channel] = value(channel);
    return result;
  }

 private:
  const at::Tensor& like_;
};

// running + (batch * factor - running) * momentum
void update_running(const at::Tensor& running, const at::Tensor& batch, double factor,
                    double momentum) {
  if (!running.defined()) return;
  const Loop::Values before(running, 0);
  const Loop::Values now(batch, 0);
  running.copy_(Loop(batch)([&](std::int64_t channel) {
    return before[channel] + (now[channel] * factor - before[channel]) * momentum;
  }));
}

void update_running(const at::Tensor& running, const at::Tensor& batch,
                    const at::Tensor& momentum) {
  if (!running.defined()) return;
  const at::Tensor before = running.to(at::kDouble);
  running.copy_(before.add(batch.sub(before).mul_(momentum)));
}

// Whether there is no value in any process.
void update_running(const BatchNorm& layer, const Statistics& batch) {
  if (batch.count.is_cpu()) {
    const auto count = batch.count.item<double>();
    if (count == 0) return;
    update_running(layer.running_mean, batch.mean, 1, layer.momentum);
    update_running(layer.running_var, batch.variance, count / std::max(1.0, count - 1),
                   layer.momentum);
    return;
  }
  const at::Tensor momentum = batch.count.gt(0).to(at::kDouble).mul_(layer.momentum);
  const at::Tensor unbiased =
      batch.variance.mul(batch.count).div_(batch.count.sub(1).clamp_min_(1));
  update_running(layer.running_mean, batch.mean, momentum);
  update_running(layer.running_var, unbiased, momentum);
}

at::Tensor fp64_or(double value, const at::Tensor& values, const at::Tensor& like) {
  return values.defined() ? values.to(at::kDouble) : at::full_like(like, value);
}

at::Tensor invstd_of(const at::Tensor& variance, double eps) {
  if (!variance.is_cpu()) return variance.add(eps).rsqrt_();
  const Loop::Values of(variance, 0);
  return Loop(variance)([&](std::int64_t channel) { return 1 / std::sqrt(of[channel] + eps); });
}

at::Tensor scale_of(const at::Tensor& weight, const at::Tensor& invstd) {
  if (!invstd.is_cpu()) return fp64_or(1, weight, invstd).mul(invstd);
  const Loop::Values weights(weight, 1);
  const Loop::Values invstds(invstd, 0);
  return Loop(invstd)([&](std::int64_t channel) { return weights[channel] * invstds[channel]; });
}

// The factors of kernels::gradient_of_input: grad * a + (input - mean) * b + c.
struct Factors {
  at::Tensor a;
  at::Tensor b;
  at::Tensor c;
};

// @param sums  of all processes
Factors factors_of(const at::Tensor& weight, const at::Tensor& invstd,
                   const kernels::GradientSums& sums, const at::Tensor& count) {
  const at::Tensor scale = scale_of(weight, invstd);
  if (!scale.is_cpu()) {
    return {scale, sums.grad_times_centred.div(count).mul_(invstd.square()).mul_(scale).neg_(),
            sums.grad.div(count).mul_(scale).neg_()};
  }
  const auto rows = count.item<double>();
  const Loop loop(scale);
  const Loop::Values scales(scale, 0);
  const Loop::Values invstds(invstd, 0);
  const Loop::Values grads(sums.grad, 0);
  const Loop::Values centred(sums.grad_times_centred, 0);
  return {scale, loop([&](std::int64_t channel) {
            return -centred[channel] / rows * invstds[channel] * invstds[channel] * scales[channel];
          }),
          loop([&](std::int64_t channel) { return -grads[channel] / rows * scales[channel]; })};
}

// The data that the backward pass needs from a layer.
struct BatchNormSettings : torch::CustomClassHolder {
  explicit BatchNormSettings(const BatchNorm& layer)
      : component(layer.component), eps(layer.eps), relu(layer.relu), peers(layer.peers) {}
  std::string_view component;
  double eps;
  bool relu;
  std::shared_ptr<const BatchNormPeers> peers;
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
    const Statistics batch = gather_statistics(input, layer.peers.get());
    if (batch.count.is_cpu() && batch.count.item<double>() == 1) {
      throw Error(layer.component, "more than 1 value a channel on all ranks together",
                  c10::str("1 (this rank's input has shape ", input.sizes(), ")"),
                  "use larger batches, or evaluation mode");
    }
    update_running(layer, batch);

    const at::Tensor invstd = invstd_of(batch.variance, layer.eps);
    at::Tensor output =
        kernels::normalize(input, batch.mean, scale_of(layer.weight, invstd),
                           fp64_or(0, layer.bias, invstd), layer.residual, layer.relu);
    ctx->save_for_backward(
        {input, layer.weight, batch.mean, invstd, batch.count, layer.relu ? output : at::Tensor()});
    save_edges(ctx, {input, layer.weight, layer.bias, layer.residual});
    ctx->saved_data["settings"] =
        c10::IValue::make_capsule(c10::make_intrusive<BatchNormSettings>(layer));
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto holder = ctx->saved_data["settings"].toCapsule();
    const auto& settings = static_cast<const BatchNormSettings&>(*holder);
    const variable_list saved = ctx->get_saved_variables();
    const bool recorded = at::GradMode::is_enabled();  // create_graph
    at::Tensor grad = gradients[0];
    if (settings.relu) {
      grad = recorded ? at::threshold_backward(grad, saved[5], 0)
                      : kernels::relu_backward(grad, saved[5]);
    }
    variable_list result = recorded && settings.peers == nullptr
                               ? gradients_through_libtorch(ctx, settings, saved, grad)
                               : gradients_of_arguments(ctx, settings, saved, grad);
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

  static variable_list gradients_of_arguments(AutogradContext* ctx,
                                              const BatchNormSettings& settings,
                                              const variable_list& saved, const at::Tensor& grad) {
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
    if (!input_needed && !is_needed(ctx, kWeight) && !is_needed(ctx, kBias)) return result;
    const auto sums = kernels::gradient_sums(grad, input, mean);
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
      result[kInput] =
          kernels::gradient_of_input(grad, input, mean, factors.a, factors.b, factors.c);
    }
    return result;
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
    const auto definition = [&] {
      const at::Tensor weight = saved[1].defined() ? saved[1].to(dtype) : at::Tensor();
      const at::Tensor normal =
          at::batch_norm(input.to(dtype), weight, bias, {}, {}, /*training=*/true, 0, settings.eps,
                         /*cudnn_enabled=*/false);
      return (residual.defined() ? normal.add(residual) : normal).to(input.scalar_type());
    };
    return recorded_gradients({input, saved[1], bias, residual}, grad, definition);
  }
};

}  // namespace

at::Tensor batch_norm(const at::Tensor& input, const BatchNorm& layer) {
  check(input, layer);
  return BatchNormFunction::apply(input, if_defined(layer.weight), if_defined(layer.bias),
                                  if_defined(layer.residual), layer);
}

at::Tensor batch_norm_in_evaluation(const at::Tensor& input, const BatchNorm& layer) {
  check(input, layer);
  at::Tensor result = at::batch_norm(input, layer.weight, layer.bias, layer.running_mean,
                                     layer.running_var, /*training=*/false, layer.momentum,
                                     layer.eps, at::globalContext().userEnabledCuDNN());
  if (layer.residual.defined()) result = result + layer.residual;
  return layer.relu ? result.relu() : result;
}

}  // namespace semitone::nn
