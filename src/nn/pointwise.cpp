#include "src/nn/pointwise.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/kernels/pointwise.h"
#include "src/nn/arguments.h"
#include "src/nn/kernel_reads.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace semitone::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class ReluFunction : public torch::autograd::Function<ReluFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, bool in_place) {
    at::Tensor result;
    if (in_place) {
      kernels::relu_(input);
      ctx->mark_dirty({input});
      result = input;
    } else {
      result = kernels::relu(input);
    }
    ctx->save_for_backward({result});
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const at::Tensor result = ctx->get_saved_variables()[0];
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    // With create_graph the gradient is differentiated again, by LibTorch.
    return {at::GradMode::is_enabled() ? at::threshold_backward(gradients[0], result, 0)
                                       : kernels::relu_backward(gradients[0], result),
            at::Tensor()};
  }
};

class AddFunction : public torch::autograd::Function<AddFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& a, const at::Tensor& b,
                            bool in_place) {
    if (!in_place) return kernels::add(a, b);
    kernels::add_(a, b);
    ctx->mark_dirty({a});
    return a;
  }

  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& gradients) {
    return {gradients[0], gradients[0], at::Tensor()};
  }
};

void check_sum(const char* component, const at::Tensor& a, const at::Tensor& b) {
  if (b.layout() == at::kStrided && b.device() == a.device() && b.sizes() == a.sizes() &&
      b.scalar_type() == a.scalar_type())
    return;
  throw Error(component,
              c10::str("dense tensors of one shape and dtype: ", dtype_name(a.scalar_type()), " ",
                       a.sizes()),
              c10::str(dtype_name(b.scalar_type()), " ", b.sizes()));
}

}  // namespace

at::Tensor relu(const at::Tensor& input) {
  note_kernel_reads(input);
  return is_recorded({input}) ? ReluFunction::apply(input, false) : kernels::relu(input);
}

at::Tensor relu_(const at::Tensor& input) {
  note_kernel_reads(input);
  if (is_recorded({input})) return ReluFunction::apply(input, true);
  kernels::relu_(input);
  return input;
}

at::Tensor add(const at::Tensor& a, const at::Tensor& b) {
  check_sum("nn.add", a, b);
  note_kernel_reads(a, b);
  return is_recorded({a, b}) ? AddFunction::apply(a, b, false) : kernels::add(a, b);
}

at::Tensor add_(const at::Tensor& a, const at::Tensor& b) {
  check_sum("nn.add_", a, b);
  note_kernel_reads(a, b);
  if (is_recorded({a, b})) return AddFunction::apply(a, b, true);
  kernels::add_(a, b);
  return a;
}

}  // namespace semitone::nn
