#pragma once

#include "semitone/data/prefetch_options.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace semitone::data::detail {

// Moves tensors to the device of the options, on a stream of its own if the device has streams.
// Immutable: used by the thread that reads the loader and by the one that iterates.
class Mover {
 public:
  // Error if an option has a value that it cannot have.
  explicit Mover(const PrefetchOptions& options);

  // The options, with the device's index.
  const PrefetchOptions& options() const { return options_; }
  // The stream of the copies; nothing on a CPU.
  const std::optional<c10::Stream>& side() const { return side_; }

  // A tensor of the loader on the device, in the dtype and format. Called with the side stream
  // current.
  at::Tensor move(const at::Tensor& tensor) const;

  // The side stream waits for what this thread has launched.
  void wait_for_caller() const;
  // Marks the end of a batch's copies.
  std::optional<c10::Event> mark() const;
  // This thread's stream waits for the mark, and keeps the batch's memory.
  void hand_over(const std::optional<c10::Event>& mark,
                 const std::vector<at::Tensor>& tensors) const;

 private:
  c10::Stream current_stream() const;
  at::Tensor to_device(const at::Tensor& tensor, c10::ScalarType dtype) const;
  at::Tensor pinned(const at::Tensor& tensor, c10::ScalarType dtype) const;

  PrefetchOptions options_;
  std::optional<c10::Stream> side_;
};

}  // namespace semitone::data::detail
