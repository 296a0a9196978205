#include "src/nn/checks.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"

#include <c10/util/StringUtil.h>

#include <string>

namespace semitone::nn {
namespace {

bool is_computed(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || is_16bit(dtype);
}

std::string kind_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  return c10::str(dtype_name(tensor.scalar_type()), ", ", tensor.layout(), ", on ",
                  tensor.device());
}

}  // namespace

void check_input(std::string_view component, const at::Tensor& input) {
  if (!input.defined() || !is_computed(input.scalar_type()) || input.layout() != at::kStrided)
    throw Error(component, "a dense input of float16, bfloat16, float32 or float64",
                kind_of(input));
}

void check_values(std::string_view component, std::string_view name, const at::Tensor& values,
                  const at::Tensor& input, at::IntArrayRef shape) {
  if (!values.defined()) return;
  if (values.sizes() != shape) {
    throw Error(component, c10::str("a ", name, " of shape ", shape),
                c10::str("one of shape ", values.sizes()));
  }
  const bool is_too_wide =
      values.scalar_type() == at::kDouble && input.scalar_type() != at::kDouble;
  if (!is_computed(values.scalar_type()) || is_too_wide || values.layout() != at::kStrided ||
      values.device() != input.device()) {
    throw Error(component,
                c10::str("a dense ", name, " of the input's dtype (",
                         dtype_name(input.scalar_type()), ") or float32 on ", input.device()),
                kind_of(values));
  }
}

}  // namespace semitone::nn
