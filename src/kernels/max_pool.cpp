#include "src/kernels/max_pool.h"

#include "src/kernels/flat.h"
#include "src/kernels/max_pool_kernel.h"
#include "src/kernels/on_cuda.h"
#include "src/kernels/parallel_rows.h"

#include <torch/types.h>

#include <cstddef>
#include <optional>

namespace semitone::kernels {
namespace {

static_assert(kMaxPoolWindow == kMostPlaces);

// Returns nothing for arguments for which LibTorch must report an error.
std::optional<PoolAxis> axis_of(const at::Tensor& input, const MaxPool& pool, std::size_t axis) {
  const std::int64_t size = input.size(static_cast<std::int64_t>(axis) + 2);
  const std::int64_t kernel = pool.kernel[axis];
  const std::int64_t stride = pool.stride[axis];
  const std::int64_t padding = pool.padding[axis];
  if (kernel < 1 || stride < 1 || padding < 0 || padding > kernel / 2 ||
      size + 2 * padding < kernel)
    return std::nullopt;
  return PoolAxis{.input = static_cast<std::size_t>(size),
                  .output = static_cast<std::size_t>((size + 2 * padding - kernel) / stride + 1),
                  .kernel = static_cast<std::size_t>(kernel),
                  .stride = static_cast<std::size_t>(stride),
                  .padding = static_cast<std::size_t>(padding)};
}

// An input as the kernels see it; nothing if only the reference supports it.
std::optional<PoolLayout> layout_of(const at::Tensor& input, const MaxPool& pool) {
  const auto format = format_of(input.scalar_type());
  if (!format.has_value() || !has_kernels(input) || input.layout() != at::kStrided ||
      input.dim() != 4 || input.numel() == 0 || input.is_neg() ||
      input.suggest_memory_format() != at::MemoryFormat::ChannelsLast ||
      !input.is_contiguous(at::MemoryFormat::ChannelsLast))
    return std::nullopt;
  const auto height = axis_of(input, pool, 0);
  const auto width = axis_of(input, pool, 1);
  if (!height.has_value() || !width.has_value() || height->kernel > kMaxPoolWindow ||
      width->kernel > kMaxPoolWindow || pool.window() > kMaxPoolWindow)
    return std::nullopt;
  return PoolLayout{.format = *format,
                    .channels = static_cast<std::size_t>(input.size(1)),
                    .height = *height,
                    .width = *width};
}

}  // namespace

bool has_max_pool_kernel(const at::Tensor& input, const MaxPool& pool) {
  return layout_of(input, pool).has_value();
}

MaxPooled max_pool2d(const at::Tensor& input, const MaxPool& pool, bool with_places) {
  const auto layout = layout_of(input, pool);
  if (!layout.has_value()) return ref::max_pool2d(input, pool, with_places);
  const auto channels_last = input.options().memory_format(at::MemoryFormat::ChannelsLast);
  const std::array<std::int64_t, 4> shape{input.size(0), input.size(1),
                                          static_cast<std::int64_t>(layout->height.output),
                                          static_cast<std::int64_t>(layout->width.output)};
  MaxPooled pooled{.output = at::empty(shape, channels_last), .places = {}};
  if (with_places) pooled.places = at::empty(shape, channels_last.dtype(at::kByte));
  const void* const in = input.const_data_ptr();
  void* const out = pooled.output.mutable_data_ptr();
  auto* const places = with_places ? pooled.places.mutable_data_ptr<std::uint8_t>() : nullptr;
  if (runs_on_cuda(input)) {
    max_pool_cuda(*layout, in, out, places, static_cast<std::size_t>(shape[0]),
                  CurrentCuda(input).stream());
    return pooled;
  }
  for_all_rows(
      shape[0] * shape[2], shape[1] * shape[3] * pool.window(),
      [&](std::size_t begin, std::size_t end) { max_pool(*layout, in, out, places, begin, end); });
  return pooled;
}

at::Tensor max_pool2d_backward(const at::Tensor& grad, const at::Tensor& places,
                               const at::Tensor& input, const MaxPool& pool) {
  const auto layout = layout_of(input, pool);
  if (!layout.has_value() || grad.scalar_type() != input.scalar_type() ||
      !same_device(grad, input) || grad.sizes() != places.sizes())
    return ref::max_pool2d_backward(grad, places, input, pool);
  const at::Tensor gradient = grad.resolve_neg().contiguous(at::MemoryFormat::ChannelsLast);
  at::Tensor result = at::empty_like(input);
  const void* const from = gradient.const_data_ptr();
  const auto* const where = places.const_data_ptr<std::uint8_t>();
  void* const to = result.mutable_data_ptr();
  if (runs_on_cuda(input)) {
    max_pool_backward_cuda(*layout, from, where, to, static_cast<std::size_t>(input.size(0)),
                           CurrentCuda(input).stream());
    return result;
  }
  for_all_rows(input.size(0) * input.size(2), input.size(1) * input.size(3),
               [&](std::size_t begin, std::size_t end) {
                 max_pool_backward(*layout, from, where, to, begin, end);
               });
  return result;
}

}  // namespace semitone::kernels
