#pragma once

#include <c10/core/Device.h>

#include <string>
#include <string_view>

// The device that a training or a benchmark runs on, as the flag --device names it.
namespace semitone::train {

// What --device accepts: auto, cpu, cuda, or cuda:N with a number of a GPU.
bool is_device_name(std::string_view name);

// Whether the name is that of one GPU, cuda:N.
bool names_one_gpu(std::string_view name);

// Returns the device. auto is a GPU if LibTorch can use one, otherwise the CPU; cuda is LibTorch's
// current GPU.
//
// Error, with the reason, if LibTorch cannot use a GPU that the name asks for.
c10::Device find_device(std::string_view name);

// The flag of `semitone train` and `semitone bench`.
//
// @param add  cli::Flags, which makes a flag of each line
template <typename Flags>
void add_device_flag(Flags& add, std::string& name) {
  add.text(
      "--device", name, "auto|cpu|cuda|cuda:N", is_device_name,
      "Device; auto: a GPU if LibTorch can use one, otherwise the CPU. Each process of several "
      "uses a GPU of its own");
}

}  // namespace semitone::train
