#include "src/kernels/multi_tensor.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/parallel_for.h"
#include "src/kernels/flat.h"
#include "src/kernels/kernels.h"
#include "src/kernels/on_cuda.h"

#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace semitone::kernels {
namespace {

bool fits_kernel(const Unscale& item) {
  const auto in = format_of(item.grad.scalar_type());
  const auto out = format_of(item.out.scalar_type());
  return has_kernels(item.grad) && in.has_value() && out.has_value() &&
         (in == out || out == Format::fp32) && same_flat_layout(item.grad, item.out) &&
         (!item.addend.defined() || (item.addend.scalar_type() == item.out.scalar_type() &&
                                     same_flat_layout(item.addend, item.out)));
}

[[noreturn]] void fail(const char* expected, const std::string& got) {
  throw Error("kernels.multi_tensor_unscale", expected, got);
}

void check(const at::Tensor& tensor, const Unscale& item, const at::Tensor& found_inf) {
  if (!tensor.defined()) fail("a gradient and an output", "an undefined tensor");
  if (!tensor.is_floating_point()) fail("floating-point tensors", dtype_name(tensor.scalar_type()));
  if (tensor.layout() != at::kStrided) fail("strided tensors", c10::str(tensor.layout()));
  if (tensor.device() != found_inf.device()) {
    fail("gradients and found_inf on one device",
         tensor.device().str() + " and " + found_inf.device().str());
  }
  if (tensor.sizes() != item.grad.sizes()) {
    fail("an output and an addend of the gradient's shape",
         c10::str(tensor.sizes(), " for ", item.grad.sizes()));
  }
}

void check(const Unscale& item, const at::Tensor& found_inf) {
  check(item.grad, item, found_inf);
  check(item.out, item, found_inf);
  if (item.addend.defined()) check(item.addend, item, found_inf);
}

void run_on_cpu(std::span<const Unscale> items, const InverseScale& inverse,
                at::Tensor& found_inf) {
  const float inv_scale =
      inverse.on_device.defined() ? *inverse.on_device.const_data_ptr<float>() : inverse.number;
  struct Chunk {
    const char* in;
    const char* addend;
    char* out;
    std::int64_t size;
    Format in_format;
    Format out_format;
  };
  std::vector<Chunk> chunks;
  for (const Unscale& item : items) {
    const Format in_format = *format_of(item.grad.scalar_type());
    const Format out_format = *format_of(item.out.scalar_type());
    const auto* in = static_cast<const char*>(item.grad.const_data_ptr());
    const auto* addend =
        item.addend.defined() ? static_cast<const char*>(item.addend.const_data_ptr()) : nullptr;
    char* out = written_data(item.out);
    for (std::int64_t begin = 0; begin < item.grad.numel(); begin += kChunk) {
      const auto in_offset = begin * static_cast<std::int64_t>(bytes_of(in_format));
      const auto out_offset = begin * static_cast<std::int64_t>(bytes_of(out_format));
      chunks.push_back({in + in_offset, addend == nullptr ? nullptr : addend + out_offset,
                        out + out_offset, std::min(kChunk, item.grad.numel() - begin), in_format,
                        out_format});
    }
  }
  std::atomic<bool> non_finite = false;
  parallel_for(0, static_cast<std::int64_t>(chunks.size()), 4,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   const Chunk& chunk = chunks[static_cast<std::size_t>(i)];
                   if (unscale(chunk.in, chunk.in_format, chunk.addend, chunk.out, chunk.out_format,
                               static_cast<std::size_t>(chunk.size), inv_scale)) {
                     non_finite.store(true, std::memory_order_relaxed);
                   }
                 }
               });
  if (non_finite) found_inf.fill_(1);
}

void run_on_cuda(std::span<const Unscale> items, const InverseScale& inverse,
                 at::Tensor& found_inf) {
  std::vector<UnscaleSpan> spans;
  for (const Unscale& item : items) {
    spans.push_back({.in = item.grad.const_data_ptr(),
                     .in_format = *format_of(item.grad.scalar_type()),
                     .addend = item.addend.defined() ? item.addend.const_data_ptr() : nullptr,
                     .out = written_data(item.out),
                     .out_format = *format_of(item.out.scalar_type()),
                     .size = static_cast<std::size_t>(item.grad.numel())});
  }
  auto* const flag = reinterpret_cast<float*>(written_data(found_inf));
  const float* const on_device =
      inverse.on_device.defined() ? inverse.on_device.const_data_ptr<float>() : nullptr;
  unscale_cuda(spans, inverse.number, on_device, flag, CurrentCuda(found_inf).stream());
}

}  // namespace

void multi_tensor_unscale(std::span<const Unscale> items, const InverseScale& inv_scale,
                          at::Tensor& found_inf) {
  if (found_inf.scalar_type() != at::kFloat || found_inf.numel() != 1) {
    fail("found_inf of one float32",
         c10::str(found_inf.numel(), " of ", dtype_name(found_inf.scalar_type())));
  }
  const at::Tensor& inverse = inv_scale.on_device;
  if (inverse.defined() && (inverse.scalar_type() != at::kFloat || inverse.numel() != 1 ||
                            inverse.device() != found_inf.device())) {
    fail("an inverse scale of one float32 where found_inf is",
         c10::str(inverse.numel(), " of ", dtype_name(inverse.scalar_type()), " on ",
                  inverse.device()));
  }
  const at::NoGradGuard no_grad;
  std::vector<Unscale> flat;
  std::vector<Unscale> others;
  for (const Unscale& item : items) {
    check(item, found_inf);
    (fits_kernel(item) ? flat : others).push_back(item);
  }
  if (!flat.empty())
    (runs_on_cuda(found_inf) ? run_on_cuda : run_on_cpu)(flat, inv_scale, found_inf);
  if (!others.empty()) ref::multi_tensor_unscale(others, inv_scale, found_inf);
}

}  // namespace semitone::kernels
