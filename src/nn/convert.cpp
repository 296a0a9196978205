#include "src/nn/convert.h"

#include "src/kernels/convert.h"
#include "src/nn/arguments.h"
#include "src/nn/kernel_reads.h"
#include "src/nn/plain.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace semitone::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class ConvertFunction : public torch::autograd::Function<ConvertFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor, at::ScalarType dtype) {
    ctx->set_materialize_grads(false);  // no gradient is none, as LibTorch has it
    ctx->saved_data["dtype"] = static_cast<std::int64_t>(tensor.scalar_type());
    return kernels::convert(tensor, dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    return {convert(gradients[0], dtype), at::Tensor()};
  }
};

class RoundFunction : public torch::autograd::Function<RoundFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor, at::ScalarType dtype) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["dtype"] = static_cast<std::int64_t>(dtype);
    return kernels::round_to(tensor, dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    return {round_to(gradients[0], dtype), at::Tensor()};
  }
};

}  // namespace

at::Tensor round_to(const at::Tensor& tensor, at::ScalarType dtype) {
  if (tensor.scalar_type() != at::kFloat || !is_plain(tensor) ||
      !kernels::is_worth_converting(tensor, dtype))
    return tensor.to(dtype).to(at::kFloat);
  note_kernel_reads(tensor);
  return is_recorded({tensor}) ? RoundFunction::apply(tensor, dtype)
                               : kernels::round_to(tensor, dtype);
}

at::Tensor convert(const at::Tensor& tensor, at::ScalarType dtype) {
  if (tensor.scalar_type() == dtype || !is_plain(tensor) ||
      !kernels::is_worth_converting(tensor, dtype))
    return tensor.to(dtype);
  note_kernel_reads(tensor);
  return is_recorded({tensor}) ? ConvertFunction::apply(tensor, dtype)
                               : kernels::convert(tensor, dtype);
}

}  // namespace semitone::nn
