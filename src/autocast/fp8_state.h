#pragma once

#include "semitone/autocast/fp8_options.h"
#include "semitone/autocast/fp8_scaling.h"
#include "src/autocast/compiled_policy.h"

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace semitone::amp {

// Error for an option that is out of range.
void check(const Fp8Options& options);

// What is scaled of a product.
enum class Fp8Role : std::uint8_t { input, weight, gradient };

// The amaxes and scales of the weights that a policy is bound to. Threads may use it at a time.
class Fp8State {
 public:
  using Named = std::vector<std::pair<std::string, BoundParameter>>;

  // The parameters of two and more dimensions but those that stay in 16 bits. Error if a glob
  // matches none.
  Fp8State(const Fp8Options& options, const Named& parameters);

  const Fp8Options& options() const { return options_; }
  c10::ScalarType format(Fp8Role role) const {
    return role == Fp8Role::gradient ? options_.backward() : options_.forward();
  }

  // The weight that a tensor is, or a view of; on a thread with a copy of the model, its original.
  std::optional<std::size_t> find(const at::Tensor& tensor) const;
  // Whether a tensor is one that Fp8Options::keep_16bit_params names, or a view of one.
  bool stays_in_16_bits(const at::Tensor& tensor) const;

  // The values of a tensor in the role's format, and the scale that they were multiplied by.
  struct Rounded {
    at::Tensor values;  // fp32
    float scale;
  };
  // @param records  whether the tensor's amax counts in the next scale
  Rounded round(std::size_t weight, Fp8Role role, const at::Tensor& tensor, bool records);

  void update();
  void discard();
  void set_amax_hook(Fp8Scaling::AmaxHook hook);
  std::vector<Fp8Scaling::Scales> scales() const;
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  static constexpr std::size_t kRoles = 3;
  static std::size_t place(std::size_t weight, Fp8Role role) {
    return weight * kRoles + static_cast<std::size_t>(role);
  }
  float scale_for(float amax, Fp8Role role) const;
  // What all ranks have seen.
  std::vector<float> agreed(const Fp8Scaling::AmaxHook& hook, const std::vector<float>& amax) const;
  void require_saved_options(torch::serialize::InputArchive& archive) const;

  const Fp8Options options_;
  std::vector<std::string> names_;
  std::vector<BoundParameter> weights_;  // keep their addresses reserved
  std::vector<BoundParameter> left_out_;
  std::unordered_set<const c10::TensorImpl*> in_16_bits_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_address_;

  mutable std::mutex mutex_;  // of all that follows
  std::vector<float> amax_;   // since the last update, by place()
  std::vector<float> scales_;
  std::vector<std::vector<float>> history_;  // of each step, at most amax_history()
  std::size_t oldest_ = 0;
  Fp8Scaling::AmaxHook hook_;
};

}  // namespace semitone::amp
