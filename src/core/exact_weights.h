#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

// Where the fp32 values of a model's 16-bit parameters are: with an optimizer that trains them. A
// room that sends a model from one process to another has to send these, too, or the processes go
// on with other numbers.
//
// A parameter is found in a table of the process by its address, which is its own as long as the
// holder of its value keeps it alive.
namespace semitone {

class ExactWeights {
 public:
  ExactWeights() = default;
  ExactWeights(const ExactWeights&) = delete;
  ExactWeights& operator=(const ExactWeights&) = delete;
  virtual ~ExactWeights() = default;

  // The fp32 value of a parameter: the optimizer's own tensor or a copy. Undefined: none.
  virtual at::Tensor value_of(const at::Tensor& parameter) const = 0;
  // Sets the value, and rounds it into the parameter.
  virtual void set(const at::Tensor& parameter, const at::Tensor& value) = 0;
};

// Says that a holder has a parameter's value. Replaces what was said before.
void announce_exact_weight(const at::Tensor& parameter, std::weak_ptr<ExactWeights> holder);
// Takes it back. Nothing happens if another one has replaced it since.
void withdraw_exact_weight(const at::Tensor& parameter, const ExactWeights* holder) noexcept;
// Null: none was announced.
std::shared_ptr<ExactWeights> exact_weights_of(const at::Tensor& parameter);

// For what has given all ranks one value of a tensor: where that is a 16-bit parameter, it becomes the
// exact value too. What the holders have below it differs from rank to rank.
void settle_exact_weight(const at::Tensor& parameter);

}  // namespace semitone
