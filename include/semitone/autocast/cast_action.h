#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>

namespace semitone::amp {

/// What autocast does with an operator's arguments. It casts fp32, fp16 and bf16 tensors on the
/// policy's device; fp64, integer and complex tensors are never cast.
enum class CastAction {
  lower,  ///< cast to the policy's 16-bit dtype
  fp32,  ///< cast to fp32; an operator with a dtype argument gets dtype=float32 instead, unless the
         ///< caller passed one
  promote,  ///< cast to the 16-bit dtype, or to fp32 if any argument is fp32
  widest,   ///< cast to the widest dtype of the arguments: fp32 if any is fp32, or if fp16 meets
            ///< bf16; nothing is cast to 16 bits
  leave,    ///< no cast: run in the dtypes of the arguments
  ban,      ///< Error if an argument is 16-bit; fp32 arguments pass
};

/// "lower", "fp32", "promote", "widest", "leave", "ban".
std::string_view name_of(CastAction action);

/// One row of a policy's table.
struct CastRow {
  CastAction action;
  std::string reason;  ///< why, in a few words
};

/// How 16-bit matrix products, convolutions, LSTM and attention are computed if the CPU has no fast
/// kernels for them (docs/numerics.md). Emulation converts the arguments to fp32, computes and sums
/// in fp32, and rounds the result once. The results are those of a tensor core, up to the order of
/// summation, forward and backward, at fp32's speed. LibTorch's own kernels take 10 to 500 times as
/// long.
enum class Emulation {
  automatic,  ///< emulates calls that need a missing kernel, decided per kind of operator, and
              ///< convolutions that LibTorch's oneDNN computes wrongly on processors with AMX
              ///< (docs/numerics.md)
  always,     ///< emulates every call, so that machines agree as closely as in fp32
  never,      ///< LibTorch's own kernels
};

/// "automatic", "always", "never".
std::string_view name_of(Emulation emulation);

/// The device and 16-bit dtype of a policy. Converts from either. Defaults: default_device() and
/// default_16bit_dtype(device).
struct CastTarget {
  CastTarget();
  CastTarget(c10::DeviceType device_type);  // NOLINT(google-explicit-constructor)
  CastTarget(c10::ScalarType lower_dtype);  // NOLINT(google-explicit-constructor)
  CastTarget(c10::DeviceType device_type, c10::ScalarType lower_dtype);

  c10::DeviceType device;
  c10::ScalarType dtype;  ///< fp16 or bf16
};

}  // namespace semitone::amp
