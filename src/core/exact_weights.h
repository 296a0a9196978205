#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

// Locates the fp32 values of a model's 16-bit parameters, which the optimizer holds. Code that
// sends a model from one process to another must send these values too; otherwise the processes
// continue with different numbers.
//
// A process-wide table maps a parameter's address to the holder of its value. The address is valid
// as long as the holder keeps the parameter alive.
namespace semitone {

class ExactWeights {
 public:
  ExactWeights() = default;
  ExactWeights(const ExactWeights&) = delete;
  ExactWeights& operator=(const ExactWeights&) = delete;
  virtual ~ExactWeights() = default;

  // The fp32 values of parameters: the optimizer's own tensors or copies. Undefined where there is
  // none. One call takes as long for all parameters of a model as for one.
  virtual std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& parameters) const = 0;
  at::Tensor value_of(const at::Tensor& parameter) const { return values_of({parameter}).front(); }
  // Sets the value, and rounds it into the parameter.
  virtual void set(const at::Tensor& parameter, const at::Tensor& value) = 0;
};

// Registers a holder of a parameter's value, and replaces an earlier one.
void announce_exact_weight(const at::Tensor& parameter, std::weak_ptr<ExactWeights> holder);
// Removes a registration. No effect if another holder has replaced it.
void withdraw_exact_weight(const at::Tensor& parameter, const ExactWeights* holder) noexcept;
// Null if no holder is registered.
std::shared_ptr<ExactWeights> exact_weights_of(const at::Tensor& parameter);

// The fp32 values of 16-bit tensors, with one call of each holder; undefined for those without one,
// and for tensors of other dtypes, whose own values are exact.
std::vector<at::Tensor> exact_values_of(const std::vector<at::Tensor>& parameters);

// Call it after all ranks got the same value of a tensor. If that is a 16-bit parameter, the value
// also becomes the exact value: the holders' lower bits differ between ranks.
void settle_exact_weight(const at::Tensor& parameter);

}  // namespace semitone
