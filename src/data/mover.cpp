#include "src/data/mover.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <utility>

namespace semitone::data::detail {
namespace {

constexpr auto kComponent = "data.prefetch_loader";

// The device with its index.
c10::Device find_device(c10::Device device) {
  const c10::DeviceType type = device.type();
  if (!at::isAccelerator(type)) return device;
  const std::string expected = "a device " + device.str();
  if (!c10::impl::hasDeviceGuardImpl(type)) {
    throw Error(kComponent, expected, "a LibTorch without " + c10::DeviceTypeName(type),
                "use a LibTorch with it, or the CPU");
  }
  const c10::impl::VirtualGuardImpl guard(type);
  const c10::DeviceIndex count = guard.deviceCount();
  if (count == 0 || device.index() >= count) {
    throw Error(kComponent, expected, std::to_string(count) + " of this type",
                "name one of them, or the CPU");
  }
  return device.has_index() ? device : guard.getDevice();
}

PrefetchOptions checked(const PrefetchOptions& options) {
  if (options.depth() == 0)
    throw Error(kComponent, "a depth of at least 1", "0", "use 1 for one batch ahead");
  if (options.dtype().has_value() && !c10::isFloatingType(*options.dtype()))
    throw Error(kComponent, "a floating-point dtype", dtype_name(*options.dtype()),
                "cast other tensors in the transform");
  return PrefetchOptions(find_device(options.device()))
      .dtype(options.dtype())
      .memory_format(options.memory_format())
      .depth(options.depth())
      .background(options.background());
}

// Whether the tensor needs no copy for the format. A single channel or pixel has strides that
// is_contiguous() accepts for several formats.
bool has_format(const at::Tensor& tensor, c10::MemoryFormat format) {
  switch (format) {
    case c10::MemoryFormat::ChannelsLast:
      return tensor.dim() != 4 ||
             tensor.strides() == c10::get_channels_last_strides_2d(tensor.sizes());
    case c10::MemoryFormat::ChannelsLast3d:
      return tensor.dim() != 5 ||
             tensor.strides() == c10::get_channels_last_strides_3d(tensor.sizes());
    case c10::MemoryFormat::Contiguous:
      return tensor.is_contiguous();
    default:
      return true;
  }
}

at::Tensor convert(const at::Tensor& tensor, c10::ScalarType dtype, c10::MemoryFormat format) {
  if (!has_format(tensor, format))
    return tensor.to(dtype, /*non_blocking=*/false, /*copy=*/true, format);
  return tensor.to(dtype);
}

// Keeps the memory of a tensor of a device until what a stream has been given so far is done.
void record(const at::Tensor& tensor, c10::Stream stream) {
  switch (tensor.layout()) {
    case c10::kStrided:
      return tensor.record_stream(stream);
    case c10::kSparse:
      tensor._indices().record_stream(stream);
      return tensor._values().record_stream(stream);
    case c10::kSparseCsr:
    case c10::kSparseBsr:
      tensor.crow_indices().record_stream(stream);
      tensor.col_indices().record_stream(stream);
      return tensor.values().record_stream(stream);
    case c10::kSparseCsc:
    case c10::kSparseBsc:
      tensor.ccol_indices().record_stream(stream);
      tensor.row_indices().record_stream(stream);
      return tensor.values().record_stream(stream);
    default:
      return;  // of CPUs
  }
}

}  // namespace

Mover::Mover(const PrefetchOptions& options) : options_(checked(options)) {
  if (at::isAccelerator(options_.device().type())) {
    side_ = c10::impl::VirtualGuardImpl(options_.device().type())
                .getStreamFromGlobalPool(options_.device());
  }
}

at::Tensor Mover::move(const at::Tensor& tensor) const {
  if (!tensor.defined()) return tensor;
  const c10::ScalarType dtype = tensor.is_floating_point()
                                    ? options_.dtype().value_or(tensor.scalar_type())
                                    : tensor.scalar_type();
  if (tensor.layout() != at::kStrided) {
    if (side_.has_value() && tensor.device() == options_.device()) record(tensor, *side_);
    return tensor.to(options_.device(), dtype);
  }
  return convert(to_device(tensor, dtype), dtype, options_.memory_format());
}

at::Tensor Mover::to_device(const at::Tensor& tensor, c10::ScalarType dtype) const {
  if (tensor.device() == options_.device()) {
    // A cast reads it on the side stream.
    if (side_.has_value()) tensor.record_stream(*side_);
    return tensor;
  }
  if (!side_.has_value() || !tensor.is_cpu() || tensor.numel() == 0)
    return tensor.to(options_.device());
  return pinned(tensor, dtype).to(options_.device(), /*non_blocking=*/true);
}

// LibTorch keeps pinned memory that is freed until the copies from it are done.
at::Tensor Mover::pinned(const at::Tensor& tensor, c10::ScalarType dtype) const {
  // A copy that would have to gather elements first blocks.
  if (tensor.is_non_overlapping_and_dense() && tensor.is_pinned()) return tensor;
  const bool narrows = std::cmp_less(c10::elementSize(dtype), tensor.element_size());
  at::Tensor host = at::empty_like(
      tensor, tensor.options().dtype(narrows ? dtype : tensor.scalar_type()).pinned_memory(true));
  host.copy_(tensor);
  return host;
}

c10::Stream Mover::current_stream() const {
  return c10::impl::VirtualGuardImpl(options_.device().type()).getStream(options_.device());
}

void Mover::wait_for_caller() const {
  if (!side_.has_value()) return;
  c10::Event launched(options_.device().type());
  launched.record(current_stream());
  launched.block(*side_);
}

std::optional<c10::Event> Mover::mark() const {
  if (!side_.has_value()) return std::nullopt;
  std::optional<c10::Event> event(options_.device().type());
  event->record(*side_);
  return event;
}

void Mover::hand_over(const std::optional<c10::Event>& mark,
                      const std::vector<at::Tensor>& tensors) const {
  if (!mark.has_value()) return;
  const c10::Stream stream = current_stream();
  mark->block(stream);
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.device() == options_.device()) record(tensor, stream);
  }
}

}  // namespace semitone::data::detail
