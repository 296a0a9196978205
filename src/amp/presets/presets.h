#pragma once

#include "semitone/amp/cast_policy.h"

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
