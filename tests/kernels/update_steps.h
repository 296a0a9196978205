#pragma once

#include "src/kernels/multi_tensor_update.h"
#include "tests/support/all_rules.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

// Optimizer steps and parameters for the tests of multi_tensor_update.
namespace semitone::kernels::update_test {

// A rule with its kernel, its reference and the number of its state tensors.
struct Step {
  std::string name;
  std::size_t states;
  std::function<void(std::span<const Update>)> kernel;
  std::function<void(const Update&)> definition;
  bool takes_bf16_state = false;
  bool writes_state = true;
};

// Every branch of every rule, with numbers that are all different, so that a swap is detected; and
// every rule of AllRules with its defaults.
std::vector<Step> all_steps();

struct Case {
  c10::ScalarType param;
  c10::ScalarType grad;
  std::optional<c10::ScalarType> copy;
  bool split = false;
  bool bf16_state = false;
};

// The steps that take the case's state.
std::vector<Step> steps_for(const Case& c);

// An item with random values over many binades, so that sums are rounded, in a layout.
Update item_like(const at::Tensor& layout, const Case& c, std::size_t states);

at::Tensor copy_of(const at::Tensor& tensor);
Update copy_of(const Update& item);

void expect_equal(const Update& got, const Update& want);

// The kernel's results for a list are the definition's for each item, bit for bit.
void expect_as_defined(const Step& step, const std::vector<Update>& items);

}  // namespace semitone::kernels::update_test
