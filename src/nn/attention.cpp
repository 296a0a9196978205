#include "src/nn/attention.h"

#include "semitone/core/error.h"
#include "src/nn/arguments.h"
#include "src/nn/kernel_reads.h"
#include "src/nn/recorded_gradients.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/types.h>

#include <utility>

namespace semitone::nn {
namespace {

using kernels::Attention;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// For the backward pass, without the mask.
struct SavedSettings : torch::CustomClassHolder {
  explicit SavedSettings(Attention settings_) : settings(std::move(settings_)) {
    settings.mask.reset();
  }
  Attention settings;
};

// LibTorch makes numbers of bools, and saves these: the program may change its mask after the call,
// or have made it in InferenceMode.
at::Tensor mask_to_save(const at::Tensor& mask) {
  if (!mask.defined() || mask.scalar_type() != at::kBool) return mask;
  return kernels::without_repetitions(mask).clone();
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const Attention& settings) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const auto result = kernels::attention(query, key, value, settings);
    ctx->save_for_backward({query, key, value, result.output, result.max, result.log_sum,
                            mask_to_save(settings.mask)});
    ctx->saved_data["settings"] =
        c10::IValue::make_capsule(c10::make_intrusive<SavedSettings>(settings));
    return result.output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    enum Saved : std::size_t { kQuery, kKey, kValue, kOutput, kMax, kLogSum, kMask };
    const variable_list saved = ctx->get_saved_variables();
    const auto holder = ctx->saved_data["settings"].toCapsule();
    Attention settings = static_cast<const SavedSettings&>(*holder).settings;
    settings.mask = saved[kMask];
    variable_list result;
    if (at::GradMode::is_enabled()) {  // create_graph
      result = recorded_gradients(
          {saved[kQuery], saved[kKey], saved[kValue]}, gradients[0], [&](const variable_list& in) {
            return kernels::ref::attention(in[kQuery], in[kKey], in[kValue], settings).output;
          });
    } else {
      const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
      const auto grads =
          kernels::attention_gradients(gradients[0], saved[kQuery], saved[kKey], saved[kValue],
                                       {saved[kOutput], saved[kMax], saved[kLogSum]}, settings,
                                       {.query = ctx->needs_input_grad(kQuery),
                                        .key = ctx->needs_input_grad(kKey),
                                        .value = ctx->needs_input_grad(kValue)});
      result = {grads.query, grads.key, grads.value};
    }
    result.emplace_back();  // of the settings
    return result;
  }
};

}  // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const Attention& settings) {
  if (!kernels::has_attention_kernel(query, key, value, settings)) {
    throw Error("nn.attention",
                "tensors (N, heads, length, D) in bfloat16, a scale and a mask with a kernel",
                c10::str("some of shapes ", query.sizes(), ", ", key.sizes(), " and ",
                         value.sizes(), " in ", query.scalar_type()));
  }
  if (is_recorded({settings.mask})) {
    throw Error("nn.attention", "a mask that needs no gradient", "one that requires grad",
                "use at::scaled_dot_product_attention");
  }
  note_kernel_reads(query, key, value, settings.mask);
  if (is_recorded({query, key, value}))
    return AttentionFunction::apply(query, key, value, settings);
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  return kernels::attention(query, key, value, settings).output;
}

}  // namespace semitone::nn
