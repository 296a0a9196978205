#include "src/kernels/max_pool.h"

#include <ATen/OpMathType.h>
#include <torch/types.h>

#include <tuple>

namespace semitone::kernels::ref {
namespace {

// Where the windows of one direction begin.
at::Tensor begins(const at::Tensor& pooled, const MaxPool& pool, std::size_t axis) {
  const std::int64_t count = pooled.size(static_cast<std::int64_t>(axis) + 2);
  return at::arange(count, pooled.options().dtype(at::kLong))
      .mul_(pool.stride[axis])
      .sub_(pool.padding[axis])
      .view(axis == 0 ? at::IntArrayRef{-1, 1} : at::IntArrayRef{1, -1});
}

// From LibTorch's places in the plane to places in the window, and back.
at::Tensor places_of(const at::Tensor& indices, std::int64_t width, const MaxPool& pool) {
  const at::Tensor row = indices.div(width, "floor").sub_(begins(indices, pool, 0));
  const at::Tensor column = indices.remainder(width).sub_(begins(indices, pool, 1));
  return row.mul_(pool.kernel[1]).add_(column).to(at::kByte);
}

at::Tensor indices_of(const at::Tensor& places, std::int64_t width, const MaxPool& pool) {
  const at::Tensor wide = places.to(at::kLong);
  const at::Tensor row = wide.div(pool.kernel[1], "floor").add_(begins(places, pool, 0));
  const at::Tensor column = wide.remainder(pool.kernel[1]).add_(begins(places, pool, 1));
  return row.mul_(width).add_(column);
}

}  // namespace

MaxPooled max_pool2d(const at::Tensor& input, const MaxPool& pool, bool with_places) {
  const auto [output, indices] = at::max_pool2d_with_indices(
      input, pool.kernel, pool.stride, pool.padding, /*dilation=*/{1, 1}, /*ceil_mode=*/false);
  return {output, with_places ? places_of(indices, input.size(3), pool) : at::Tensor()};
}

at::Tensor max_pool2d_backward(const at::Tensor& grad, const at::Tensor& places,
                               const at::Tensor& input, const MaxPool& pool) {
  const auto dtype = at::toOpMathType(input.scalar_type());
  return at::max_pool2d_with_indices_backward(
             grad.to(dtype), at::empty_like(input, input.options().dtype(dtype)), pool.kernel,
             pool.stride, pool.padding, /*dilation=*/{1, 1}, /*ceil_mode=*/false,
             indices_of(places, input.size(3), pool))
      .to(input.scalar_type());
}

}  // namespace semitone::kernels::ref
