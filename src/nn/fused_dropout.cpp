#include "semitone/nn/fused_dropout.h"

#include "semitone/core/error.h"
#include "src/kernels/dropout.h"
#include "src/nn/kernel_reads.h"
#include "src/nn/new_dropout.h"
#include "src/nn/plain.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool has_kernel(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return tensor.is_cpu() && tensor.layout() == at::kStrided &&
         (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
          dtype == at::kDouble);
}

// The data that the backward pass needs.
struct DropoutSettings : torch::CustomClassHolder {
  DropoutSettings(const kernels::Dropout& dropout_, at::ScalarType input_dtype_,
                  std::vector<std::int64_t> strides_)
      : dropout(dropout_), input_dtype(input_dtype_), strides(std::move(strides_)) {}
  kernels::Dropout dropout;
  at::ScalarType input_dtype;
  std::vector<std::int64_t> strides;  // of the result: the mask is in order of its memory
};

class DropoutFunction : public torch::autograd::Function<DropoutFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& residual,
                            const kernels::Dropout& dropout, at::ScalarType dtype) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    at::Tensor output = kernels::dropout(input, dropout, dtype, residual.value_or(at::Tensor()));
    ctx->saved_data["settings"] = c10::IValue::make_capsule(
        c10::make_intrusive<DropoutSettings>(dropout, input.scalar_type(), output.strides().vec()));
    ctx->saved_data["residual"] = residual.has_value();
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const auto holder = ctx->saved_data["settings"].toCapsule();
    const auto& settings = static_cast<const DropoutSettings&>(*holder);
    const at::Tensor& grad = gradients[0];
    variable_list result(4);
    if (ctx->needs_input_grad(0)) {
      // Dropout is linear: its gradient is dropout with the same mask.
      const at::Tensor from = laid_out(grad, settings.strides);
      result[0] = at::GradMode::is_enabled()
                      ? apply(from, std::nullopt, settings.dropout, settings.input_dtype)
                      : kernels::dropout(from, settings.dropout, settings.input_dtype);
    }
    if (ctx->saved_data["residual"].toBool() && ctx->needs_input_grad(1)) result[1] = grad;
    return result;
  }

 private:
  static at::Tensor laid_out(const at::Tensor& grad, at::IntArrayRef strides) {
    if (grad.strides() == strides) return grad;
    return at::empty_strided(grad.sizes(), strides, grad.options()).copy_(grad);
  }
};

void check_p(double p) {
  if (!(p >= 0 && p <= 1))
    throw Error("nn.fused_dropout", "a probability p in [0, 1]", std::to_string(p));
}

void check(const at::Tensor& input, double p) {
  check_p(p);
  if (!input.defined()) throw Error("nn.fused_dropout", "a tensor as input", "an undefined one");
}

}  // namespace

at::Tensor fused_dropout(const at::Tensor& input, double p, bool train) {
  check(input, p);
  if (p == 0 || !train || input.numel() == 0) return input;
  if (!has_kernel(input) || !is_plain(input)) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    return at::dropout(input, p, train);
  }
  note_kernel_reads(input);
  return DropoutFunction::apply(input, std::nullopt, new_dropout(p), input.scalar_type());
}

at::Tensor fused_dropout_add(const at::Tensor& input, const at::Tensor& residual, double p,
                             bool train) {
  check(input, p);
  if (!residual.defined() || residual.sizes() != input.sizes()) {
    throw Error(
        "nn.fused_dropout_add", c10::str("a residual of the input's shape ", input.sizes()),
        residual.defined() ? c10::str("one of shape ", residual.sizes()) : "an undefined one");
  }
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  if (p == 0 || !train || input.numel() == 0) return at::add(input, residual);
  if (!has_kernel(input) || !has_kernel(residual) || !are_plain(input, residual))
    return at::add(fused_dropout(input, p, train), residual);
  note_kernel_reads(input, residual);
  return DropoutFunction::apply(input, residual, new_dropout(p),
                                at::promote_types(input.scalar_type(), residual.scalar_type()));
}

FusedDropoutImpl::FusedDropoutImpl(const FusedDropoutOptions& options_) : options(options_) {
  FusedDropoutImpl::reset();
}

at::Tensor FusedDropoutImpl::forward(const at::Tensor& input, const at::Tensor& residual) {
  return residual.defined() ? fused_dropout_add(input, residual, options.p(), is_training())
                            : fused_dropout(input, options.p(), is_training());
}

void FusedDropoutImpl::reset() {
  check_p(options.p());
}

void FusedDropoutImpl::pretty_print(std::ostream& stream) const {
  stream << "semitone::nn::FusedDropout(p=" << options.p() << ")";
}

}  // namespace semitone::nn
