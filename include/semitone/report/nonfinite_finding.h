#pragma once

#include "semitone/core/error.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::report {

/// What a tensor contains, at the time of a finding.
struct TensorValues {
  /// The operator's name for it: "self", "weight", "tensors[2]"; "result", or "result 1" if there
  /// are several; "gradient 0" for a gradient in the backward pass.
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<std::int64_t> sizes;
  /// Number of elements that are NaN, +inf and -inf. A complex number counts as its two parts.
  std::int64_t nans = 0;
  std::int64_t positive_infs = 0;
  std::int64_t negative_infs = 0;
  /// Index of the first element that is not finite; empty if there is none, or for a scalar.
  std::vector<std::int64_t> first;
  /// The smallest and the largest finite element; NaN if there is none.
  double min = std::numeric_limits<double>::quiet_NaN();
  double max = std::numeric_limits<double>::quiet_NaN();
  /// The parameter or buffer whose memory it is: "layer2.conv.weight"; empty if it is none.
  std::string parameter;
  /// The operator wrote its result into this argument: only dtype, sizes and parameter are known.
  bool overwritten = false;

  /// Returns whether an element is inf or NaN.
  bool has_non_finite() const { return nans + positive_infs + negative_infs > 0; }
  /// Returns for example "weight float32 [8, 3], from -0.5 to 0.5, 2 nan".
  std::string to_string() const;
};

/// Where a NonFiniteCheck first saw an inf or a NaN.
struct NonFiniteFinding {
  enum class Origin : std::uint8_t {
    /// An operator: its result has a kind of value (NaN, +inf or -inf) that no argument has.
    op,
    /// A custom autograd function, or the backward part of an operator, that computes without
    /// operators which could be watched. Its result is not finite. It made that, or passed it on.
    function,
    /// No operator that was watched: the value was in a batch, in a parameter, in what another rank
    /// sent, or from a step that was not looked at. `op` is the operator that met it first, and
    /// `values` its argument.
    outside,
  };

  Origin origin = Origin::op;
  /// The operator: "div.Tensor", "mylib::op". For Origin::function the function: "MyFunction".
  std::string op;
  /// Operators that called it, innermost first: "cross_entropy_loss".
  std::vector<std::string> called_by;

  /// Whether it happened in the backward pass.
  bool backward = false;
  /// For the backward pass: autograd's node ("SqrtBackward0") and the operator or custom function
  /// of the forward pass to which it belongs ("sqrt"; empty if unknown).
  std::string node;
  std::string forward_op;

  /// The layer: that of a parameter among the operator's arguments or, if is_after_layer, the last
  /// layer with parameters before it in the forward pass. For the backward pass the layer of the
  /// operator in the forward pass. Empty if no model was given, or before its first layer.
  std::string layer;
  bool is_after_layer = false;

  /// What is not finite.
  TensorValues values;
  /// The floating-point arguments of the operator, those without elements excepted.
  std::vector<TensorValues> arguments;

  std::int64_t step = 0;    ///< see NonFiniteCheck::step()
  std::optional<int> rank;  ///< NonFiniteCheckOptions::rank

  /// Returns one line that says all of this.
  std::string to_string() const;
};

/// Thrown by NonFiniteCheck::throw_if_found. A training that continues after a NaN has usually
/// diverged, so this is a DivergedError.
class NonFiniteError : public DivergedError {
 public:
  explicit NonFiniteError(NonFiniteFinding finding);

  NonFiniteError(const NonFiniteError&) noexcept = default;
  NonFiniteError& operator=(const NonFiniteError&) noexcept = default;
  ~NonFiniteError() override = default;

  const NonFiniteFinding& finding() const noexcept { return *finding_; }

 private:
  std::shared_ptr<const NonFiniteFinding> finding_;
};

}  // namespace semitone::report
