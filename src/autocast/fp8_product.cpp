#include "src/autocast/fp8_product.h"

#include "semitone/core/events.h"
#include "src/autocast/caster.h"
#include "src/nn/plain.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <utility>

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

void keep(AutogradContext* ctx, const ProductPtr& product) {
  ctx->saved_data["product"] = c10::IValue::make_capsule(product);
}
ProductPtr kept(AutogradContext* ctx) {
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
    keep(ctx, product);
    ctx->saved_data["is_input"] = role == Fp8Role::input;
    ctx->saved_data["dtype"] = static_cast<std::int64_t>(operand.scalar_type());
    return product->round(role, operand, product->records);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    if (!gradients[0].defined()) return {{}, {}, {}};
    const ProductPtr product = kept(ctx);
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
    keep(ctx, product);
    return result * inverse(product->of_input, product->of_weight);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    if (!gradients[0].defined()) return {{}, {}};
    const ProductPtr product = kept(ctx);
    if (c10::GradMode::is_enabled()) product->differentiates = true;
    const at::Tensor values = RoundGradient::apply(gradients[0], product);
    if (!product->differentiates) return {values, {}};
    const float factor = inverse(product->of_input, product->of_weight) / product->of_gradient;
    return {values * factor, {}};
  }
};

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
  if (!op.is_addmm)
    return bias.defined() ? result + with_dimensions_of(bias.to(at::kFloat), weight) : result;
  constexpr std::size_t kBeta = 3;
  constexpr std::size_t kAlpha = 4;
  at::Tensor scaled = scaled_by(result, call.arguments[kAlpha]);
  if (call.arguments[kBeta].toScalar().toDouble() == 0) return scaled;
  return scaled_by(bias.to(at::kFloat), call.arguments[kBeta]) + scaled;
}

}  // namespace

std::optional<Fp8Operator> Fp8Operator::find(std::string_view name) {
  const std::string_view base = name.substr(0, name.find('.'));
  if (base == "addmm") return Fp8Operator{1, 2, 0, /*is_addmm=*/true};
  if (name == "mm" || name == "matmul") return Fp8Operator{0, 1, std::nullopt};
  constexpr std::array<std::string_view, 9> kLayers{
      "linear",           "conv1d",           "conv2d",      "conv3d",      "conv_transpose1d",
      "conv_transpose2d", "conv_transpose3d", "convolution", "_convolution"};
  if (std::find(kLayers.begin(), kLayers.end(), base) == kLayers.end()) return std::nullopt;
  return Fp8Operator{0, 1, 2};
}

at::Tensor fp8_product(const Fp8Operator& op, const std::shared_ptr<Fp8State>& state,
                       const Fp8Call& call) {
  const at::Tensor* const first = tensor_at(call.arguments, op.first);
  const at::Tensor* const second = tensor_at(call.arguments, op.second);
  if (!can_round(first) || !can_round(second) || torch::autograd::get_current_graph_task_id() != -1)
    return {};
  const auto of_second = state->find(*second);
  const auto weight = of_second.has_value() ? of_second : state->find(*first);
  if (!weight.has_value()) return {};

  const at::Tensor operands[] = {*first, *second};
  const at::Tensor bias = op.bias.has_value() && tensor_at(call.arguments, *op.bias) != nullptr
                              ? *tensor_at(call.arguments, *op.bias)
                              : at::Tensor();
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
  at::Tensor result;
  if (op.is_addmm) {
    result = at::mm(left, right);
  } else {
    call.arguments[op.first] = left;
    call.arguments[op.second] = right;
    if (op.bias.has_value()) call.arguments[*op.bias] = c10::IValue();
    result = call.compute();
  }
  result = with_bias(op, call, Unscale::apply(result, product), bias, operands[1]);
  events::emit(events::OperatorReplaced{call.op, "emulated"});
  return result.to(call.dtype);
}

}  // namespace semitone::amp
