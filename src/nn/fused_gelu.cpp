#include "semitone/nn/fused_gelu.h"

#include "semitone/core/error.h"
#include "src/kernels/gelu.h"
#include "src/nn/arguments.h"
#include "src/nn/checks.h"
#include "src/nn/kernel_reads.h"
#include "src/nn/plain.h"
#include "src/nn/recorded_gradients.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <optional>
#include <string>

namespace semitone::nn {
namespace {

using kernels::GeluForm;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

GeluForm form_of(std::string_view component, std::string_view approximate) {
  if (approximate == "none") return GeluForm::erf;
  if (approximate == "tanh") return GeluForm::tanh;
  throw Error(component, "approximate 'none' or 'tanh'", c10::str("'", approximate, "'"));
}

class GeluFunction : public torch::autograd::Function<GeluFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& bias, GeluForm form) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const at::Tensor shift = bias.value_or(at::Tensor());
    ctx->save_for_backward({input, shift});
    save_edges(ctx, {input, shift});
    ctx->saved_data["tanh"] = form == GeluForm::tanh;
    return kernels::gelu(input, shift, form);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor& bias = saved[1];
    const auto form = ctx->saved_data["tanh"].toBool() ? GeluForm::tanh : GeluForm::erf;
    variable_list result;
    if (at::GradMode::is_enabled()) {  // create_graph
      result = recorded_gradients({input, bias}, gradients[0], [&](const variable_list& in) {
        return kernels::ref::gelu(in[0], in[1], form);
      });
    } else {
      const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
      auto both = kernels::gelu_backward(gradients[0], input, bias, form, is_needed(ctx, 1));
      result = {both.input, both.bias};
    }
    result.emplace_back();  // of the form
    return result;
  }
};

at::Tensor apply(const at::Tensor& input, const at::Tensor& bias, GeluForm form) {
  const bool plain = are_plain(input, bias);
  if (plain) note_kernel_reads(input, bias);
  if (plain && is_recorded({input, bias}))
    return GeluFunction::apply(input, if_defined(bias), form);
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  return plain ? kernels::gelu(input, bias, form) : kernels::ref::gelu(input, bias, form);
}

}  // namespace

at::Tensor fused_gelu(const at::Tensor& input, std::string_view approximate) {
  constexpr auto kComponent = "nn.fused_gelu";
  check_input(kComponent, input);
  return apply(input, {}, form_of(kComponent, approximate));
}

at::Tensor fused_bias_gelu(const at::Tensor& input, const at::Tensor& bias,
                           std::string_view approximate) {
  constexpr auto kComponent = "nn.fused_bias_gelu";
  check_input(kComponent, input);
  if (input.dim() == 0) throw Error(kComponent, "an input (..., N)", "a scalar");
  if (!bias.defined())
    throw Error(kComponent, "a bias", "an undefined tensor",
                "call fused_gelu for an input without bias");
  check_values(kComponent, "bias", bias, input, input.sizes().slice(input.sizes().size() - 1));
  return apply(input, bias, form_of(kComponent, approximate));
}

}  // namespace semitone::nn
