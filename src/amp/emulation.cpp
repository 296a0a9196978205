#include "src/amp/emulation.h"

#include "src/amp/op_names.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/types.h>

#include <map>
#include <string>
#include <utility>

namespace semitone::amp {
namespace {

const std::map<std::string, MatrixProduct>& table() {
  using enum MatrixProduct;
  static const std::map<std::string, MatrixProduct> products{
      {"_addmm_activation", primitive},
      {"_convolution", convolution},
      {"_native_multi_head_attention", primitive},
      {"addbmm", primitive},
      {"addmm", primitive},
      {"addmv", primitive},
      {"addr", primitive},
      {"baddbmm", primitive},
      {"bmm", primitive},
      {"chain_matmul", composite},
      {"conv1d", convolution},
      {"conv2d", convolution},
      {"conv3d", convolution},
      {"conv_tbc", primitive},
      {"conv_transpose1d", primitive},
      {"conv_transpose2d", primitive},
      {"conv_transpose3d", primitive},
      {"convolution", convolution},
      {"dot", primitive},
      {"einsum", composite},
      {"gru", composite},
      {"gru_cell", composite},
      {"inner", composite},
      {"linalg_multi_dot", composite},
      {"linalg_vecdot", composite},
      {"linear", composite},
      {"lstm", composite},
      {"lstm_cell", composite},
      {"matmul", composite},
      {"mkldnn_rnn_layer", primitive},
      {"mm", primitive},
      {"mv", primitive},
      {"rnn_relu", composite},
      {"rnn_relu_cell", composite},
      {"rnn_tanh", composite},
      {"rnn_tanh_cell", composite},
      {"scaled_dot_product_attention", primitive},
      {"tensordot", composite},
      {"vdot", primitive},
  };
  return products;
}

// Small whole numbers: exact in every dtype, so that any difference is an error and none is
// rounding.
at::Tensor small_integers(at::IntArrayRef shape) {
  return torch::arange(c10::multiply_integers(shape), at::kFloat).remainder(5).sub_(2).view(shape);
}

bool trial_convolution_is_wrong(c10::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  const at::Tensor input = small_integers({1, 8, 13});
  const at::Tensor weight = small_integers({16, 8, 8});
  const at::Tensor got = at::conv1d(input.to(dtype), weight.to(dtype)).to(at::kFloat);
  return !at::equal(got, at::conv1d(input, weight));
}

}  // namespace

MatrixProduct matrix_product(const c10::OperatorHandle& op) {
  if (!is_aten(op.operator_name()) || writes_to_argument(op)) return MatrixProduct::none;
  const std::string name = display_name(op.operator_name());
  const auto found = table().find(name.substr(0, name.find('.')));
  return found == table().end() ? MatrixProduct::none : found->second;
}

std::vector<c10::OperatorHandle> matrix_products(std::optional<MatrixProduct> kind) {
  using Product = std::pair<c10::OperatorHandle, MatrixProduct>;
  // LibTorch has 3000 operators: looked through once, not for every policy that is bound to a model.
  static const auto* const all = new std::vector<Product>([] {
    std::vector<Product> found;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (!is_aten(name)) continue;
      const auto op = dispatcher.findSchema(name);
      if (!op.has_value()) continue;
      const MatrixProduct product = matrix_product(*op);
      if (product != MatrixProduct::none) found.emplace_back(*op, product);
    }
    return found;
  }());
  std::vector<c10::OperatorHandle> products;
  for (const auto& [op, product] : *all) {
    if (!kind.has_value() || product == *kind) products.push_back(op);
  }
  return products;
}

bool convolves_wrongly(const at::Tensor& weight, c10::ScalarType dtype) {
  if (weight.dim() < 3 || weight.device().type() != c10::DeviceType::CPU) return false;
  const std::int64_t channels = weight.size(1);
  const std::int64_t row = channels * weight.size(-1);
  if (channels >= 16 || channels % 2 != 0 || row % 32 != 0 || row <= 32) return false;
  static const bool wrong_in_bf16 = trial_convolution_is_wrong(at::kBFloat16);
  static const bool wrong_in_fp16 = trial_convolution_is_wrong(at::kHalf);
  return dtype == at::kHalf ? wrong_in_fp16 : dtype == at::kBFloat16 && wrong_in_bf16;
}

}  // namespace semitone::amp
