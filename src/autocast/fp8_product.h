#pragma once

#include "src/autocast/disable_fp8.h"
#include "src/autocast/fp8_state.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

// Products of a weight in fp8 (CastPolicy::fp8), emulated: the operator runs in fp32 on the numbers
// that fp8 holds. That is what hardware computes, up to the order of summation: products of fp8
// numbers are exact in fp32, sums are in fp32, and the scales are divided out of the result, not of
// the arguments:
//
//     result = op(round(input * s1), round(weight * s2)) / (s1 s2) + bias
//
// The same holds for both products of the backward pass, with round(gradient * s3). A gradient
// passes through the roundings of the forward pass unchanged. The bias and its gradient are not
// rounded to fp8.
namespace semitone::amp {

// The operators that have it: those that layers call, with two operands and at most a bias.
struct Fp8Operator {
  enum class Kind : std::uint8_t { linear, mm, matmul, addmm, convolution };

  Kind kind;
  std::size_t first;  // of these two arguments, one is the weight
  std::size_t second;
  std::optional<std::size_t> bias = std::nullopt;
  // Of convolutions. One with groups and without `transposed` is a transposed one.
  std::optional<std::size_t> transposed = std::nullopt;
  std::optional<std::size_t> groups = std::nullopt;

  // By the display name; nothing for other operators.
  static std::optional<Fp8Operator> find(std::string_view name);
};

// The arguments of one call, and where its result goes.
struct Fp8Call {
  const std::string& op;
  std::span<c10::IValue> arguments;
  c10::ScalarType dtype;  // of the result
  // Calls the operator with the arguments as they are then, and returns its result.
  c10::function_ref<at::Tensor()> compute;
};

// The result in fp8; undefined if none of the operands is a weight of the state, one is to stay in
// 16 bits, or sizes do not fit. So it is within a backward pass without GradMode: there only
// functions of the user call products, with gradients among the operands. The caller has excluded the
// Autocast keys.
at::Tensor fp8_product(const Fp8Operator& op, const std::shared_ptr<Fp8State>& state,
                       const Fp8Call& call);

}  // namespace semitone::amp
