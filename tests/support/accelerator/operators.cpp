#include "tests/support/accelerator/machine.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

// The operators that are more than a kernel: they make memory, or copy from device to device.
namespace semitone::test::accelerator {
namespace {

c10::Device chosen(std::optional<c10::Device> given) {
  return given.has_value() && given->has_index() ? *given : device(current_device());
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> given,
                 std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(chosen(given));
  return at::detail::empty_generic(size, c10::GetAllocator(kType),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> given, std::optional<bool> /*pin*/) {
  const c10::DeviceGuard guard(chosen(given));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kType),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

bool is_here(const at::Tensor& tensor) {
  return tensor.device().type() == kType;
}

// A copy runs on the stream of the source's device. The stream of the destination's device waits
// for it, and it for what the destination's stream has done.
void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  Machine& machine = Machine::instance();
  const c10::Stream source = current_stream(from.device().index());
  const c10::Stream destination = current_stream(to.device().index());
  machine.timeline().block(source, Clock(machine.timeline().past(destination)));
  const Moment moment = machine.timeline().launch(source);
  machine.access({{from, false}, {to, true}}, moment, "a copy");
  machine.timeline().block(destination, Clock(machine.timeline().past(source)));
  over_shadow(to).copy_(over_shadow(from));
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Machine& machine = Machine::instance();
  const c10::Stream stream = current_stream(to.device().index());
  const Moment moment = machine.timeline().launch(stream);
  machine.access({{to, true}}, moment, "a copy from the host");
  over_shadow(to).copy_(from);
  if (!non_blocking) {
    ++machine.counts().uploads;
    machine.host_waits(Clock(machine.timeline().past(stream)));
  } else if (from.is_pinned()) {
    machine.watch_source(from, from.clone(), moment);
  } else {
    ++machine.counts().unpinned_async_copies;
  }
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Machine& machine = Machine::instance();
  const c10::Stream stream = current_stream(from.device().index());
  const Moment moment = machine.timeline().launch(stream);
  machine.access({{from, false}}, moment, "a copy to the host");
  const at::Tensor values = over_shadow(from).clone().to(to.scalar_type()).expand(to.sizes());
  if (non_blocking && to.is_pinned()) {
    machine.arrive_later(to, values.contiguous(), moment);
    return;
  }
  if (non_blocking) ++machine.counts().unpinned_async_copies;
  ++machine.counts().reads;
  machine.host_waits(Clock(machine.timeline().past(stream)));
  at::Tensor(to).copy_(values);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const Lock lock(Machine::instance().mutex());
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  const bool from_here = is_here(from);
  if (from_here && is_here(to)) {
    copy_between_devices(from, to);
  } else if (from_here) {
    copy_to_host(from, to, non_blocking);
  } else {
    copy_to_device(from, to, non_blocking);
  }
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  const Lock lock(Machine::instance().mutex());
  auto* const impl = self.unsafeGetTensorImpl();
  const auto elements = static_cast<std::size_t>(c10::multiply_integers(size));
  const std::size_t bytes =
      (static_cast<std::size_t>(self.storage_offset()) + elements) * self.dtype().itemsize();
  if (bytes > self.storage().nbytes()) {
    const c10::DeviceGuard guard(self.device());
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
  impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;  // NOLINT(bugprone-return-const-ref-from-parameter): as LibTorch declares it
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.numel() == 0) at::Tensor(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Machine& machine = Machine::instance();
  const Lock lock(machine.mutex());
  const c10::Stream stream = current_stream(self.device().index());
  machine.access({{self, false}}, machine.timeline().launch(stream), "item()");
  ++machine.counts().reads;
  machine.host_waits(Clock(machine.timeline().past(stream)));
  return at::_local_scalar_dense(over_shadow(self));
}

at::Tensor& set_storage_with_offset(at::Tensor& self, at::Storage source, std::int64_t offset,
                                    at::IntArrayRef size, at::IntArrayRef stride) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || stride.size() != size.size()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<std::int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_with_offset(self, std::move(source), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_with_offset(self, source.storage(), source.storage_offset(), source.sizes(),
                                 source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Allocator* const allocator = c10::GetAllocator(kType);
  return set_storage_with_offset(
      self,
      c10::Storage(c10::Storage::use_byte_size_t{}, 0, allocator->allocate(0), allocator, true), 0,
      {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  const Lock lock(Machine::instance().mutex());
  if (Block* const block = Machine::instance().memory().find(self.storage().data()))
    block->recorded.push_back(stream);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage_with_offset);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("record_stream", &record_stream);
}

}  // namespace semitone::test::accelerator
