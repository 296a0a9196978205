#include "semitone/nn/fused_cross_entropy.h"

#include "semitone/core/error.h"
#include "src/kernels/cross_entropy.h"
#include "src/kernels/on_cuda.h"
#include "src/nn/class_targets.h"
#include "src/nn/kernel_reads.h"
#include "src/nn/plain.h"
#include "src/nn/recorded_gradients.h"

#include <ATen/OpMathType.h>
#include <ATen/core/Reduction.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/enum.h>
#include <torch/types.h>

#include <cstdint>
#include <utility>

namespace semitone::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kFusedCrossEntropy = "nn.fused_cross_entropy";

struct CrossEntropySettings {
  std::int64_t reduction;
  std::int64_t ignore_index;
  double label_smoothing;
  bool inplace_backward;
};

// Whether the memory may be that of a parameter.
bool is_leaf_or_its_view(const at::Tensor& tensor) {
  return tensor.is_leaf() || (tensor.is_view() && tensor._base().is_leaf());
}

bool has_loss_kernel(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return tensor.layout() == at::kStrided &&
         (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16
              ? kernels::has_kernels(tensor)
              : dtype == at::kDouble && tensor.is_cpu());
}

// For logits (N, C) without class weights.
void check_targets_of(const at::Tensor& logits, const at::Tensor& target) {
  if (target.dim() != 1 || target.size(0) != logits.size(0)) {
    throw Error(kFusedCrossEntropy,
                c10::str("targets (N) or (N, C) for logits (N, C) of shape ", logits.sizes()),
                c10::str("targets of shape ", target.sizes()));
  }
  check_targets(kFusedCrossEntropy, target, logits, "logits'");
}

// Converts 16-bit logits to fp32.
at::Tensor libtorch_cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                  const at::Tensor& weight, const CrossEntropySettings& settings) {
  const auto dtype = at::toOpMathType(logits.scalar_type());
  return at::cross_entropy_loss(
      logits.to(dtype), target.is_floating_point() ? target.to(dtype) : target,
      weight.defined() ? std::optional(weight.to(dtype)) : std::nullopt, settings.reduction,
      settings.ignore_index, settings.label_smoothing);
}

class CrossEntropyFunction : public torch::autograd::Function<CrossEntropyFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits,
                            const at::Tensor& target, const CrossEntropySettings& settings) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const at::Tensor count =
        count_rows(kFusedCrossEntropy, target, logits.size(1), settings.ignore_index);
    const auto losses =
        kernels::cross_entropy(logits, {target, settings.ignore_index, settings.label_smoothing});
    ctx->save_for_backward({logits, target, losses.max, losses.inv_sum, count});
    ctx->saved_data["reduction"] = settings.reduction;
    ctx->saved_data["ignore_index"] = settings.ignore_index;
    ctx->saved_data["label_smoothing"] = settings.label_smoothing;
    ctx->saved_data["inplace_backward"] = settings.inplace_backward;
    return reduced(losses.loss, count, settings.reduction);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const CrossEntropySettings settings = settings_of(ctx);
    if (at::GradMode::is_enabled()) {  // create_graph
      const auto result =
          recorded_gradients({saved[0]}, gradients[0], [&](const variable_list& in) {
            return libtorch_cross_entropy(in[0], saved[1], {}, settings);
          });
      return {result[0], {}, {}};
    }
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    at::Tensor grad = gradients[0];
    if (settings.reduction == at::Reduction::Mean) grad = grad.to(at::kDouble).div(saved[4]);
    const at::Tensor result = kernels::cross_entropy_gradient(
        saved[0].detach(), {saved[1], settings.ignore_index, settings.label_smoothing},
        {.loss = {}, .max = saved[2], .inv_sum = saved[3]}, grad.to(saved[2].scalar_type()),
        settings.inplace_backward && !is_leaf_or_its_view(saved[0]));
    return {result, {}, {}};
  }

 private:
  static CrossEntropySettings settings_of(AutogradContext* ctx) {
    return {.reduction = ctx->saved_data["reduction"].toInt(),
            .ignore_index = ctx->saved_data["ignore_index"].toInt(),
            .label_smoothing = ctx->saved_data["label_smoothing"].toDouble(),
            .inplace_backward = ctx->saved_data["inplace_backward"].toBool()};
  }
};

}  // namespace

at::Tensor fused_cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                               const FusedCrossEntropyOptions& options) {
  check_defined(kFusedCrossEntropy, logits, "logits");
  check_defined(kFusedCrossEntropy, target, "targets");
  check_label_smoothing(kFusedCrossEntropy, options.label_smoothing());
  const CrossEntropySettings settings{
      .reduction = torch::enumtype::reduction_get_enum(options.reduction()),
      .ignore_index = options.ignore_index(),
      .label_smoothing = options.label_smoothing(),
      .inplace_backward = options.inplace_backward()};
  const bool probabilities = target.sizes() == logits.sizes() && target.is_floating_point();
  if (options.weight().defined() || probabilities || logits.dim() != 2 ||
      !has_loss_kernel(logits) || !are_plain(logits, target)) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    return libtorch_cross_entropy(logits, target, options.weight(), settings);
  }
  check_targets_of(logits, target);
  note_kernel_reads(logits, target);
  return CrossEntropyFunction::apply(logits, target.to(at::kLong), settings);
}

FusedCrossEntropyImpl::FusedCrossEntropyImpl(FusedCrossEntropyOptions options_)
    : options(std::move(options_)) {
  FusedCrossEntropyImpl::reset();
}

at::Tensor FusedCrossEntropyImpl::forward(const at::Tensor& logits, const at::Tensor& target) {
  FusedCrossEntropyOptions with_buffer = options;
  return fused_cross_entropy(logits, target, with_buffer.weight(weight));
}

void FusedCrossEntropyImpl::reset() {
  check_label_smoothing(kFusedCrossEntropy, options.label_smoothing());
  // A copy: conversions of a module, and clones of it, set the data of their buffers.
  const at::Tensor& given = options.weight();
  weight = register_buffer("weight", given.defined() ? given.detach().clone() : given);
}

void FusedCrossEntropyImpl::pretty_print(std::ostream& stream) const {
  stream << "semitone::nn::FusedCrossEntropy(ignore_index=" << options.ignore_index()
         << ", label_smoothing=" << options.label_smoothing() << ")";
}

}  // namespace semitone::nn
