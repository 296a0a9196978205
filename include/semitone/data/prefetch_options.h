#pragma once

#include <c10/core/Device.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <cstddef>
#include <optional>

namespace semitone::data {

/// Options of PrefetchLoader. A device alone converts to them.
class PrefetchOptions {
 public:
  /// @param device  to which batches are copied. Without an index: the current device of its type
  /// when the PrefetchLoader is constructed
  PrefetchOptions(c10::Device device) : device_(device) {}  // NOLINT(google-explicit-constructor)
  PrefetchOptions(c10::DeviceType device)
      : device_(device) {}  // NOLINT(google-explicit-constructor)

  c10::Device device() const { return device_; }

  /// The dtype that floating-point tensors are cast to: a floating-point one. Others, such as
  /// labels and uint8 images, keep their dtype. Default: no cast.
  TORCH_ARG(std::optional<c10::ScalarType>, dtype) = std::nullopt;
  /// The memory format: ChannelsLast for tensors of four dimensions, ChannelsLast3d for those of
  /// five, Contiguous for all. Default: Preserve, the format of the loader's tensors.
  TORCH_ARG(c10::MemoryFormat, memory_format) = c10::MemoryFormat::Preserve;
  /// The number of batches that are kept ready, at least 1. Each takes memory of the device.
  /// Default 2, as PyTorch's prefetch_factor.
  TORCH_ARG(std::size_t, depth) = 2;
  /// Whether a thread reads the loader ahead. False: the thread that iterates reads the next
  /// batches before it returns the current one, and only copies to a device overlap with its work
  /// (Apex's data_prefetcher). Default true.
  TORCH_ARG(bool, background) = true;

 private:
  c10::Device device_;
};

}  // namespace semitone::data
