#include "src/autocast/presets/presets.h"

#include <array>

namespace semitone::amp::presets {
namespace {

Table semitone(c10::DeviceType device) {
  return device == c10::DeviceType::CPU ? Table{semitone_cpu()} : Table{torch_cuda(), true};
}

Table torch(c10::DeviceType device) {
  return {device == c10::DeviceType::CPU ? torch_cpu() : torch_cuda(), true};
}

// Rows that are the same on every device.
template <std::span<const Rows> (*rows)()>
Table everywhere(c10::DeviceType) {
  return {rows()};
}

std::span<const Rows> no_rows() {
  return {};
}

constexpr std::array<Preset, 6> kPresets{{
    {.name = "semitone", .table = semitone, .fast_kernels = true},
    {.name = "torch", .table = torch, .as_libtorch = true},
    {.name = "apex", .table = everywhere<apex>},
    {.name = "paddle", .table = everywhere<paddle_o1>},
    {.name = "paddle-o2", .table = everywhere<paddle_o2>},
    {.name = "none", .table = everywhere<no_rows>, .fast_kernels = true},
}};

}  // namespace

std::span<const Preset> all() {
  return kPresets;
}

}  // namespace semitone::amp::presets
