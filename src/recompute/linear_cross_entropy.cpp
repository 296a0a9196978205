#include "semitone/recompute/linear_cross_entropy.h"

#include "semitone/core/error.h"
#include "semitone/nn/fused_cross_entropy.h"
#include "src/autocast/disable_fp8.h"
#include "src/nn/class_targets.h"
#include "src/nn/plain.h"
#include "src/nn/recorded_gradients.h"
#include "src/recompute/chunked_softmax.h"
#include "src/recompute/surroundings.h"

#include <ATen/OpMathType.h>
#include <ATen/core/Reduction.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/enum.h>
#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

namespace semitone::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr auto kComponent = "nn.linear_cross_entropy";

// The regions are for the linear layer alone.
struct NoCasts {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// In fp8, each chunk would have a scale of its own.
at::Tensor linear_without_fp8(const at::Tensor& input, const at::Tensor& weight,
                              const at::Tensor& bias) {
  const amp::DisableFp8 no_fp8;
  return at::linear(input, weight, bias);
}

// What a call computes, and where: for its backward pass.
struct Call : torch::CustomClassHolder {
  std::int64_t reduction;
  std::int64_t ignore_index;
  double label_smoothing;
  std::int64_t chunk_size;
  AutocastRegions regions;

  ChunkedTargets targets(const at::Tensor& classes, const at::Tensor& weight) const {
    return {classes, ignore_index, label_smoothing, weight.size(0)};
  }
};
using CallPtr = c10::intrusive_ptr<Call>;

// One chunk of classes of a linear layer.
struct Chunk {
  std::int64_t first;
  at::Tensor weight;
  at::Tensor bias;
};

// One chunk of all classes is a view too: the hooks of the weight and the bias are for the gradients
// that backward() returns, not for those within it.
template <typename Use>
void for_chunks(const at::Tensor& weight, const at::Tensor& bias, std::int64_t size,
                const Use& use) {
  for (std::int64_t first = 0; first < weight.size(0); first += size) {
    const std::int64_t count = std::min(size, weight.size(0) - first);
    use(Chunk{first, weight.narrow(0, first, count),
              bias.defined() ? bias.narrow(0, first, count) : bias});
  }
}

// The gradients of the three inputs: undefined where none is needed.
class Gradients {
 public:
  Gradients(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias)
      : input_(input) {
    if (input.requires_grad())
      sum_ = at::zeros(input.sizes(), input.options().dtype(at::toOpMathType(input.scalar_type())));
    if (weight.requires_grad()) weight_ = at::empty_like(weight);
    if (bias.defined() && bias.requires_grad()) bias_ = at::empty_like(bias);
  }

  // Adds those of a chunk, whose logits were computed by linear(input, chunk.weight, chunk.bias).
  void add(const at::Tensor& input, const Chunk& chunk, const at::Tensor& logits,
           const at::Tensor& grad) {
    variable_list wanted;
    if (sum_.defined()) wanted.push_back(input);
    if (weight_.defined()) wanted.push_back(chunk.weight);
    if (bias_.defined()) wanted.push_back(chunk.bias);
    const variable_list found = torch::autograd::grad({logits}, wanted, {grad});
    const at::NoGradGuard no_grad;
    std::size_t next = 0;
    if (sum_.defined()) sum_.add_(found[next++]);
    if (weight_.defined()) part_of(weight_, chunk).copy_(found[next++]);
    if (bias_.defined()) part_of(bias_, chunk).copy_(found[next]);
  }

  variable_list result() const {
    return {sum_.defined() ? sum_.to(input_.scalar_type()) : sum_, weight_, bias_};
  }

 private:
  static at::Tensor part_of(const at::Tensor& whole, const Chunk& chunk) {
    return whole.narrow(0, chunk.first, chunk.weight.size(0));
  }

  at::Tensor input_;
  at::Tensor sum_;
  at::Tensor weight_;
  at::Tensor bias_;
};

// The definition.
at::Tensor with_all_logits(const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias, const at::Tensor& target, const Call& call) {
  FusedCrossEntropyOptions options;
  options.ignore_index(call.ignore_index).label_smoothing(call.label_smoothing);
  if (call.reduction == at::Reduction::None) options.reduction(torch::kNone);
  if (call.reduction == at::Reduction::Sum) options.reduction(torch::kSum);
  return fused_cross_entropy(linear_without_fp8(input, weight, bias), target, options);
}

class LinearCrossEntropyFunction : public torch::autograd::Function<LinearCrossEntropyFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& given_bias, const at::Tensor& target,
                            const CallPtr& call) {
    // LibTorch's regions would keep a cast that is made without gradients, for other uses of the
    // weight in the same region.
    const NoKeptCasts no_kept_casts;
    const at::Tensor bias = given_bias.value_or(at::Tensor());
    const at::Tensor count = count_rows(kComponent, target, weight.size(0), call->ignore_index);
    ChunkedSoftmax softmax(call->targets(target, weight));
    const auto add = [&](const Chunk& chunk) {
      const at::Tensor logits = linear_without_fp8(input, chunk.weight, chunk.bias);
      const NoCasts no_casts;
      softmax.add(logits, chunk.first);
    };
    if (weight.size(0) > 0 && weight.size(0) <= call->chunk_size) {
      add({0, weight, bias});  // the weight itself, whose cast a region of Semitone's keeps
    } else {
      for_chunks(weight, bias, call->chunk_size, add);
    }
    const NoCasts no_casts;
    const kernels::RowLosses losses = softmax.losses();
    ctx->save_for_backward({input, weight, bias, target, losses.max, losses.inv_sum, count});
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    return reduced(losses.loss, count, call->reduction);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor& bias = saved[2];
    const at::Tensor& target = saved[3];
    const auto capsule = ctx->saved_data["call"].toCapsule();
    const Call& call = dynamic_cast<const Call&>(*capsule);
    if (at::GradMode::is_enabled()) {  // create_graph
      variable_list result = recorded_gradients(
          {input, weight, bias}, gradients[0],
          [&](const variable_list& in) {
            const AutocastRegions::Scope regions(call.regions);
            return with_all_logits(in[0], in[1], in[2], target, call);
          },
          InRegions::yes);
      result.resize(5);
      return result;
    }
    const kernels::RowLosses losses{.loss = {}, .max = saved[4], .inv_sum = saved[5]};
    at::Tensor grad = gradients[0].to(at::kDouble);
    if (call.reduction == at::Reduction::Mean) grad = grad.div(saved[6]);
    grad = grad.expand_as(target).to(losses.max.scalar_type()).contiguous();
    Gradients result(input, weight, bias);
    const at::AutoGradMode recording(true);
    for_chunks(weight, bias, call.chunk_size, [&](const Chunk& chunk) {
      // Another leaf for each chunk: its graph ends there.
      const at::Tensor rows = input.detach().requires_grad_(input.requires_grad());
      const at::Tensor logits = [&] {
        const AutocastRegions::Scope regions(call.regions);
        return linear_without_fp8(rows, chunk.weight, chunk.bias);
      }();
      const NoCasts no_casts;
      result.add(rows, chunk, logits,
                 gradient_of_chunk(logits.detach(), chunk.first, call.targets(target, weight),
                                   losses, grad));
    });
    variable_list all = result.result();
    all.resize(5);
    return all;
  }
};

void require_matching(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                      const at::Tensor& target) {
  if (input.dim() < 1 || weight.dim() != 2 || weight.size(1) != input.size(-1)) {
    throw Error(kComponent, "an input (…, H) and a linear_weight (C, H)",
                c10::str(input.sizes(), " and ", weight.sizes()));
  }
  if (bias.defined() && bias.sizes() != weight.sizes().slice(0, 1)) {
    throw Error(kComponent, c10::str("a linear_bias of shape ", weight.sizes().slice(0, 1)),
                c10::str(bias.sizes()));
  }
  const at::IntArrayRef rows = input.sizes().slice(0, static_cast<std::size_t>(input.dim() - 1));
  if (target.sizes() != rows) {
    throw Error(kComponent,
                c10::str("targets of shape ", rows, " for an input of shape ", input.sizes()),
                c10::str("targets of shape ", target.sizes()));
  }
}

std::int64_t chunk_size_of(std::optional<std::int64_t> wanted, std::int64_t rows) {
  constexpr std::int64_t kLogits = 1 << 23;
  constexpr std::int64_t kFewest = 256;  // smaller products are slower
  if (!wanted.has_value()) return std::max(kLogits / std::max(rows, std::int64_t{1}), kFewest);
  if (*wanted < 1) throw Error(kComponent, "a chunk_size of at least 1", std::to_string(*wanted));
  return *wanted;
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& linear_weight,
                                const at::Tensor& target,
                                const LinearCrossEntropyOptions& options) {
  check_defined(kComponent, input, "an input");
  check_defined(kComponent, linear_weight, "a linear_weight");
  check_defined(kComponent, target, "targets");
  check_label_smoothing(kComponent, options.label_smoothing());
  require_matching(input, linear_weight, options.linear_bias(), target);
  check_targets(kComponent, target, input, "input's");
  const auto call = c10::make_intrusive<Call>();
  call->reduction = torch::enumtype::reduction_get_enum(options.reduction());
  call->ignore_index = options.ignore_index();
  call->label_smoothing = options.label_smoothing();
  call->chunk_size = chunk_size_of(options.chunk_size(), target.numel());
  const at::Tensor rows = input.reshape({target.numel(), input.size(-1)});
  const at::Tensor classes = target.to(at::kLong).flatten();
  const at::Tensor& bias = options.linear_bias();
  const bool in_chunks =
      (rows.is_cpu() || rows.is_cuda()) && are_plain(rows, linear_weight, bias, classes);
  const at::Tensor loss =
      in_chunks ? LinearCrossEntropyFunction::apply(
                      rows, linear_weight, bias.defined() ? std::optional(bias) : std::nullopt,
                      classes, call)
                : with_all_logits(rows, linear_weight, bias, classes, *call);
  return call->reduction == at::Reduction::None ? loss.view(target.sizes()) : loss;
}

}  // namespace semitone::nn
