#include "src/autocast/emulation.h"

#include "src/autocast/convolution_arguments.h"
#include "src/autocast/op_names.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace semitone::amp {
namespace {

const std::map<std::string, MatrixProduct>& table() {
  using enum OperatorKind;
  constexpr bool kComposite = true;
  constexpr bool kSteps = true;
  static const std::map<std::string, MatrixProduct> products{
      {"_addmm_activation", {product}},
      {"_convolution", {convolution}},
      {"_native_multi_head_attention", {attention}},
      {"addbmm", {product}},
      {"addmm", {product}},
      {"addmv", {product}},
      {"addr", {product}},
      {"baddbmm", {product}},
      {"bmm", {product}},
      {"chain_matmul", {product, kComposite}},
      {"conv1d", {convolution}},
      {"conv2d", {convolution}},
      {"conv3d", {convolution}},
      {"conv_tbc", {product}},
      {"conv_transpose1d", {transposed_convolution}},
      {"conv_transpose2d", {transposed_convolution}},
      {"conv_transpose3d", {transposed_convolution}},
      {"convolution", {convolution}},
      {"dot", {product}},
      {"einsum", {product, kComposite}},
      {"gru", {product, kComposite, kSteps}},
      {"gru_cell", {product, kComposite, kSteps}},
      {"inner", {product, kComposite}},
      {"linalg_multi_dot", {product, kComposite}},
      {"linalg_vecdot", {product, kComposite}},
      {"linear", {product, kComposite}},
      {"lstm", {recurrent, kComposite}},
      {"lstm.data", {product, kComposite, kSteps}},  // of packed sequences
      {"lstm_cell", {product, kComposite, kSteps}},
      {"matmul", {product, kComposite}},
      {"mkldnn_rnn_layer", {recurrent}},
      {"mm", {product}},
      {"mv", {product}},
      {"rnn_relu", {product, kComposite, kSteps}},
      {"rnn_relu_cell", {product, kComposite, kSteps}},
      {"rnn_tanh", {product, kComposite, kSteps}},
      {"rnn_tanh_cell", {product, kComposite, kSteps}},
      {"scaled_dot_product_attention", {attention}},
      {"tensordot", {product, kComposite}},
      {"vdot", {product}},
  };
  return products;
}

std::vector<c10::OperatorHandle> all_products(bool convolutions_only) {
  using Product = std::pair<c10::OperatorHandle, MatrixProduct>;
  // LibTorch has 3000 operators, so they are searched once, not for every policy that is bound to a
  // model.
  static const auto* const all = new std::vector<Product>([] {
    std::vector<Product> found;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (!is_aten(name)) continue;
      const auto op = dispatcher.findSchema(name);
      if (!op.has_value()) continue;
      const auto product = matrix_product(*op);
      if (product.has_value()) found.emplace_back(*op, *product);
    }
    return found;
  }());
  std::vector<c10::OperatorHandle> products;
  for (const auto& [op, product] : *all) {
    if (!convolutions_only || product.convolves()) products.push_back(op);
  }
  return products;
}

using Arguments = std::span<const c10::IValue>;

OperatorKind kind_of(const MatrixProduct& product, Arguments arguments) {
  if (!product.is_convolution()) return product.kind;
  const bool has_transposed = arguments[PlainConvolutionPlace::kTransposed].isBool();
  if (has_transposed && arguments[PlainConvolutionPlace::kTransposed].toBool())
    return OperatorKind::transposed_convolution;
  const c10::IValue& groups =
      arguments[has_transposed ? PlainConvolutionPlace::kGroupsAfterTransposed
                               : PlainConvolutionPlace::kGroups];
  return groups.isInt() && groups.toInt() == 1 ? OperatorKind::convolution
                                               : OperatorKind::grouped_convolution;
}

struct WantedGradients {
  bool of_data = false;
  bool of_weights = false;
};

// In all of them the first argument is the operator's input, and weights follow.
WantedGradients wanted_gradients(Arguments arguments) {
  WantedGradients wanted;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    bool& recorded = i == 0 ? wanted.of_data : wanted.of_weights;
    if (arguments[i].isTensor()) {
      recorded = recorded || arguments[i].toTensor().requires_grad();
    } else if (arguments[i].isTensorList()) {
      for (const at::Tensor& tensor : arguments[i].toTensorVector())
        recorded = recorded || tensor.requires_grad();
    }
  }
  return wanted;
}

// Whether the only kernel for the gradient of fp16 weights (oneDNN's
// brgemm_convolution_bwd_weights_t on AMX-FP16) supports a convolution: neither dilated nor padded
// by more than half a kernel.
bool is_usual(Arguments arguments) {
  const auto all_are_one = [](const c10::IValue& value) {
    const auto sizes = value.toIntVector();
    return std::all_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size == 1; });
  };
  if (!arguments[PlainConvolutionPlace::kDilation].isIntList() ||
      !all_are_one(arguments[PlainConvolutionPlace::kDilation]))
    return false;
  if (arguments[PlainConvolutionPlace::kPadding].isString())
    return true;  // "same" is half a kernel
  if (!arguments[PlainConvolutionPlace::kPadding].isIntList()) return false;
  const auto padding = arguments[PlainConvolutionPlace::kPadding].toIntVector();
  const auto kernel = arguments[PlainConvolutionPlace::kWeight].toTensor().sizes().slice(2);
  for (std::size_t i = 0; i < kernel.size() && !padding.empty(); ++i) {
    if (padding[std::min(i, padding.size() - 1)] > kernel[i] / 2) return false;
  }
  return true;
}

}  // namespace

std::optional<MatrixProduct> matrix_product(const c10::OperatorHandle& op) {
  if (!is_aten(op.operator_name()) || writes_to_argument(op)) return std::nullopt;
  const std::string name = display_name(op.operator_name());
  auto found = table().find(name);
  if (found == table().end()) found = table().find(name.substr(0, name.find('.')));
  return found == table().end() ? std::nullopt : std::optional(found->second);
}

std::vector<c10::OperatorHandle> matrix_products() {
  return all_products(/*convolutions_only=*/false);
}

std::vector<c10::OperatorHandle> convolutions() {
  return all_products(/*convolutions_only=*/true);
}

bool runs_natively(const MatrixProduct& product, std::span<const c10::IValue> arguments,
                   const NativeKernels& kernels) {
  if (kernels.is_all() || kernels.is_none()) return kernels.is_all();
  const OperatorKind kind = kind_of(product, arguments);
  if (!kernels.has(kind, Pass::forward)) return false;
  if (!c10::GradMode::is_enabled()) return true;
  const auto [of_data, of_weights] = wanted_gradients(arguments);
  if (of_data && !kernels.has(kind, Pass::backward_data)) return false;
  return !of_weights || (kernels.has(kind, Pass::backward_weights) &&
                         (kind != OperatorKind::convolution || is_usual(arguments)));
}

bool has_small_steps(std::span<const c10::IValue> arguments) {
  constexpr std::int64_t kWeights = 32 * 1024;
  // Cells take (input, state, input weights, state weights, …); networks a list of these, after
  // (input, state) or, of packed sequences, (data, batch sizes, state).
  const c10::IValue& fourth = arguments[3];
  if (fourth.isTensor()) return fourth.toTensor().numel() < kWeights;
  const c10::IValue& weights = fourth.isTensorList() ? fourth : arguments[2];
  if (!weights.isTensorList()) return false;
  const auto list = weights.toTensorVector();
  return list.size() > 1 && list[1].numel() < kWeights;
}

}  // namespace semitone::amp
