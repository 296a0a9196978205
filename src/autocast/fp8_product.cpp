#include "src/autocast/fp8_product.h"

#include "semitone/core/events.h"
#include "src/autocast/caster.h"
#include "src/nn/plain.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// One call: its scales, which the backward pass completes.
struct Product : torch::CustomClassHolder {
  std::shared_ptr<Fp8State> state;
  std::size_t weight = 0;
  std::string op;
  bool records = false;  // amaxes
  float of_input = 1;
  float of_weight = 1;
  float of_gradient = 1;
  // A gradient is differentiated (create_graph). Gradients are then those of the rounded values, as
  // derivatives of derivatives have to be. Else they are those of the result before its division by
  // the scales, times the gradient's scale: numbers of fp8.
  bool differentiates = false;

  float& scale(Fp8Role role) {
    return role == Fp8Role::input ? of_input : role == Fp8Role::weight ? of_weight : of_gradient;
  }

  at::Tensor round(Fp8Role role, const at::Tensor& tensor, bool records_amax) {
    auto rounded = state->round(weight, role, tensor, records_amax);
    scale(role) = rounded.scale;
    events::emit(events::Cast{op, tensor.scalar_type(), state->format(role), tensor.numel(),
                              /*cached=*/false});
    return std::move(rounded.values);
  }
};
using ProductPtr = c10::intrusive_ptr<Product>;

// 1 / (a b), as fp32 holds it.
float inverse(float a, float b) {
  constexpr auto kMax = static_cast<double>(std::numeric_limits<float>::max());
  return static_cast<float>(std::min(1 / (static_cast<double>(a) * static_cast<double>(b)), kMax));
}

void save_product(AutogradContext* ctx, const ProductPtr& product) {
  ctx->saved_data["product"] = c10::IValue::make_capsule(product);
}
ProductPtr saved_product(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Product>(ctx->saved_data["product"].toCapsule());
}

// Rounds a gradient. In graphs of gradients (create_graph) the rounding counts as the
// multiplication by the scale that it is, apart from the rounding.
struct RoundGradient : torch::autograd::Function<RoundGradient> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gradient,
                            const ProductPtr& product) {
    at::Tensor values = product->round(Fp8Role::gradient, gradient, /*records_amax=*/true);
    ctx->saved_data["scale"] = static_cast<double>(product->of_gradient);
    return values;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    if (!gradients[0].defined()) return {{}, {}};
    return {gradients[0] * ctx->saved_data["scale"].toDouble(), {}};
  }
};

// Rounds an operand. Its gradient comes from a product of the other operand and the gradient, which
// have their scales.
struct RoundOperand : torch::autograd::Function<RoundOperand> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& operand,
                            const ProductPtr& product, Fp8Role role) {
    save_product(ctx, product);
    ctx->saved_data["is_input"] = role == Fp8Role::input;
    ctx->saved_data["dtype"] = static_cast<std::int64_t>(operand.scalar_type());
    return product->round(role, operand, product->records);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    if (!gradients[0].defined()) return {{}, {}, {}};
    const ProductPtr product = saved_product(ctx);
    const bool is_input = ctx->saved_data["is_input"].toBool();
    const float own = is_input ? product->of_input : product->of_weight;
    const float other = is_input ? product->of_weight : product->of_input;
    const float factor = product->differentiates ? own : inverse(product->of_gradient, other);
    const auto dtype = static_cast<c10::ScalarType>(ctx->saved_data["dtype"].toInt());
    return {(gradients[0] * factor).to(dtype), {}, {}};
  }
};

// Divides the scales of the operands out of a result, and rounds its gradient.
struct Unscale : torch::autograd::Function<Unscale> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& result,
                            const ProductPtr& product) {
    save_product(ctx, product);
    return result * inverse(product->of_input, product->of_weight);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    if (!gradients[0].defined()) return {{}, {}};
    const ProductPtr product = saved_product(ctx);
    if (c10::GradMode::is_enabled()) product->differentiates = true;
    const at::Tensor values = RoundGradient::apply(gradients[0], product);
    if (!product->differentiates) return {values, {}};
    const float factor = inverse(product->of_input, product->of_weight) / product->of_gradient;
    return {values * factor, {}};
  }
};

// A matrix product whose backward pass, also in turn, is not cast: in a region of autocast it would
// multiply the large numbers of fp8, up to 57344 x 448, in 16 bits.
struct Mm : torch::autograd::Function<Mm> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& left, const at::Tensor& right) {
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    ctx->save_for_backward({left, right});
    return at::mm(left, right);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    if (!gradients[0].defined()) return {{}, {}};
    const variable_list saved = ctx->get_saved_variables();
    variable_list result(2);
    if (ctx->needs_input_grad(0)) result[0] = Mm::apply(gradients[0], saved[1].t());
    if (ctx->needs_input_grad(1)) result[1] = Mm::apply(saved[0].t(), gradients[0]);
    return result;
  }
};

// Whether one of two operands is a matrix, and their sizes fit.
bool is_matrix_product(const at::Tensor& left, const at::Tensor& right) {
  if (left.dim() < 1 || right.dim() < 1 || (left.dim() != 2 && right.dim() != 2)) return false;
  const std::int64_t rows = right.dim() == 1 ? right.size(0) : right.size(-2);
  return left.size(-1) == rows;
}

// at::matmul, of which the one operand that is not a matrix becomes one.
at::Tensor matrix_product(const at::Tensor& left, const at::Tensor& right) {
  if (left.dim() == 2 && right.dim() == 2) return Mm::apply(left, right);
  if (right.dim() == 1) return Mm::apply(left, right.unsqueeze(1)).squeeze(1);
  // Contiguous, as at::matmul's: view() may follow.
  if (right.dim() > 2) return matrix_product(right.mT(), left.t()).mT().contiguous();
  std::vector<std::int64_t> sizes = left.sizes().vec();
  sizes.back() = right.size(1);
  return Mm::apply(left.reshape({-1, left.size(-1)}), right).view(sizes);
}

// An argument that is a tensor, or null.
const at::Tensor* tensor_at(std::span<const c10::IValue> arguments, std::size_t index) {
  const c10::IValue& value = arguments[index];
  return value.isTensor() && value.toTensor().defined() ? &value.toTensor() : nullptr;
}

bool can_round(const at::Tensor* operand) {
  return operand != nullptr && is_eligible(*operand, operand->device().type()) &&
         nn::is_plain(*operand);
}

// With the result's dimensions behind the channels.
at::Tensor with_dimensions_of(const at::Tensor& bias, const at::Tensor& weight) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(weight.dim() - 1), 1);
  sizes.front() = -1;
  return bias.reshape(sizes);
}

at::Tensor scaled_by(const at::Tensor& tensor, const c10::IValue& factor) {
  const at::Scalar scalar = factor.toScalar();
  return scalar.toDouble() == 1 ? tensor : tensor * scalar;
}

at::Tensor with_bias(const Fp8Operator& op, const Fp8Call& call, const at::Tensor& result,
                     const at::Tensor& bias, const at::Tensor& weight) {
  if (op.kind != Fp8Operator::Kind::addmm) {
    if (!bias.defined()) return result;
    const at::Tensor wide = bias.to(at::kFloat);
    return result +
           (op.kind == Fp8Operator::Kind::linear ? wide : with_dimensions_of(wide, weight));
  }
  constexpr std::size_t kBeta = 3;
  constexpr std::size_t kAlpha = 4;
  at::Tensor scaled = scaled_by(result, call.arguments[kAlpha]);
  if (call.arguments[kBeta].toScalar().toDouble() == 0) return scaled;
  return scaled + scaled_by(bias.to(at::kFloat), call.arguments[kBeta]);
}

// The number of a convolution's output channels.
std::int64_t channels_of(const Fp8Operator& op, const Fp8Call& call, const at::Tensor& weight) {
  const bool is_transposed =
      op.transposed.has_value() ? call.arguments[*op.transposed].toBool() : op.groups.has_value();
  if (!is_transposed) return weight.size(0);
  return weight.size(1) * call.arguments[*op.groups].toInt();
}

// Whether the sizes are those of the operator. Others are left to LibTorch, which has its own errors,
// and other meanings of a bias.
bool fits(const Fp8Operator& op, const Fp8Call& call, const at::Tensor& left,
          const at::Tensor& right, const at::Tensor& bias) {
  switch (op.kind) {
    case Fp8Operator::Kind::matmul:
      return is_matrix_product(left, right);
    case Fp8Operator::Kind::mm:
      return left.dim() == 2 && right.dim() == 2 && is_matrix_product(left, right);
    case Fp8Operator::Kind::addmm: {
      if (left.dim() != 2 || right.dim() != 2 || !is_matrix_product(left, right)) return false;
      const std::int64_t sizes[] = {left.size(0), right.size(1)};
      return bias.defined() && at::is_expandable_to(bias.sizes(), sizes);
    }
    case Fp8Operator::Kind::linear:
      return right.dim() == 2 && left.dim() >= 1 && left.size(-1) == right.size(1) &&
             (!bias.defined() || (bias.dim() == 1 && bias.size(0) == right.size(0)));
    case Fp8Operator::Kind::convolution:
      return right.dim() >= 3 &&
             (!bias.defined() || (bias.dim() == 1 && bias.size(0) == channels_of(op, call, right)));
  }
  return false;
}

// The product of the rounded operands.
at::Tensor product_of(const Fp8Operator& op, const Fp8Call& call, const at::Tensor& left,
                      const at::Tensor& right) {
  if (op.kind == Fp8Operator::Kind::linear) return matrix_product(left, right.t());
  if (op.kind != Fp8Operator::Kind::convolution) return matrix_product(left, right);
  call.arguments[op.first] = left;
  call.arguments[op.second] = right;
  call.arguments[*op.bias] = c10::IValue();
  return call.compute();
}

thread_local int fp8_disabled = 0;

}  // namespace

DisableFp8::DisableFp8() {
  ++fp8_disabled;
}
DisableFp8::~DisableFp8() {
  --fp8_disabled;
}

std::optional<Fp8Operator> Fp8Operator::find(std::string_view name) {
  if (name == "addmm") return Fp8Operator{Kind::addmm, 1, 2, 0};
  if (name == "mm") return Fp8Operator{Kind::mm, 0, 1};
  if (name == "matmul") return Fp8Operator{Kind::matmul, 0, 1};
  if (name == "linear") return Fp8Operator{Kind::linear, 0, 1, 2};
  // Positions of `transposed` and of `groups`.
  if (name == "convolution" || name == "_convolution")
    return Fp8Operator{Kind::convolution, 0, 1, 2, 6, 8};
  const std::string_view base = name.substr(0, name.find('.'));
  if (base == "conv_transpose1d" || base == "conv_transpose2d" || base == "conv_transpose3d")
    return Fp8Operator{Kind::convolution, 0, 1, 2, std::nullopt, 6};
  if (base == "conv1d" || base == "conv2d" || base == "conv3d")
    return Fp8Operator{Kind::convolution, 0, 1, 2};
  return std::nullopt;
}

at::Tensor fp8_product(const Fp8Operator& op, const std::shared_ptr<Fp8State>& state,
                       const Fp8Call& call) {
  const at::Tensor* const first = tensor_at(call.arguments, op.first);
  const at::Tensor* const second = tensor_at(call.arguments, op.second);
  // A function of the user, in its backward: a recomputation of its forward records gradients.
  const bool is_gradient =
      torch::autograd::get_current_graph_task_id() != -1 && !c10::GradMode::is_enabled();
  if (fp8_disabled > 0 || is_gradient || !can_round(first) || !can_round(second)) return {};
  if (state->stays_in_16_bits(*first) || state->stays_in_16_bits(*second)) return {};
  const auto of_second = state->find(*second);
  const auto weight = of_second.has_value() ? of_second : state->find(*first);
  if (!weight.has_value()) return {};

  const at::Tensor operands[] = {*first, *second};
  const at::Tensor bias = op.bias.has_value() && tensor_at(call.arguments, *op.bias) != nullptr
                              ? *tensor_at(call.arguments, *op.bias)
                              : at::Tensor();
  if (!fits(op, call, operands[0], operands[1], bias)) return {};
  const auto product = c10::make_intrusive<Product>();
  product->state = state;
  product->weight = *weight;
  product->op = call.op;
  product->records = c10::GradMode::is_enabled();
  const auto role = [&](bool is_second) {
    return is_second == of_second.has_value() ? Fp8Role::weight : Fp8Role::input;
  };
  const at::Tensor left = RoundOperand::apply(operands[0], product, role(false));
  const at::Tensor right = RoundOperand::apply(operands[1], product, role(true));
  const at::Tensor result = product_of(op, call, left, right);
  const at::Tensor unscaled = Unscale::apply(result, product);
  events::emit(events::OperatorReplaced{call.op, "emulated"});
  return with_bias(op, call, unscaled, bias, operands[1]).to(call.dtype);
}

}  // namespace semitone::amp
