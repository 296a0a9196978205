#pragma once

// Internal interface: other rooms include this header.

#include "semitone/autocast/cast_action.h"

#include <span>
#include <string_view>

// The tables of the presets, as data. A name without an overload means all overloads that write to
// no argument. A name that this LibTorch does not have is skipped, so that one table serves several
// versions.
namespace semitone::amp::presets {

struct Rows {
  CastAction action;
  std::span<const std::string_view> ops;
};

// The rows of a preset for one device.
struct Table {
  std::span<const Rows> rows;
  // Whether names are complete: "prod" is only the overload without a name. Operators for which
  // LibTorch has no kernel on the device's Autocast key are then left out.
  bool is_exact = false;
};

struct Preset {
  std::string_view name;  // of CastPolicy::by_name and the program's flag --policy
  Table (*table)(c10::DeviceType device);
  bool as_libtorch = false;   // raises where LibTorch raises (CompiledPolicy)
  bool fast_kernels = false;  // Semitone's own kernels are on
};

// All presets, in the order in which messages list them. To add one, write its rows into a file of
// this folder and name it in presets.cpp.
std::span<const Preset> all();

std::span<const Rows> semitone_cpu();
std::span<const Rows> torch_cpu();
std::span<const Rows> torch_cuda();
std::span<const Rows> apex();
std::span<const Rows> paddle_o1();
std::span<const Rows> paddle_o2();

// The operators of semitone_cpu() that LibTorch's CPU has no 16-bit kernels of, by the names without
// overload.
std::span<const std::string_view> without_16bit_kernels();

// The operators that are losses, by the names without overload.
std::span<const std::string_view> losses();

// The reason for an operator's row, by the name without overload.
std::string_view reason(CastAction action, std::string_view op);

}  // namespace semitone::amp::presets
