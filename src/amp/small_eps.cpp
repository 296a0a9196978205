#include "src/amp/small_eps.h"

#include "src/amp/rank.h"
#include "src/core/log.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <algorithm>
#include <optional>

namespace semitone::amp {
namespace {

struct Eps {
  const char* optimizer;
  double value;
};

// Optimizers that add eps to a root in their parameters' dtype. Semitone's own compute in fp32.
std::optional<Eps> eps_of(const torch::optim::OptimizerOptions& options) {
  if (const auto* const adam = dynamic_cast<const torch::optim::AdamOptions*>(&options))
    return Eps{"Adam", adam->eps()};
  if (const auto* const adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options))
    return Eps{"AdamW", adamw->eps()};
  if (const auto* const rmsprop = dynamic_cast<const torch::optim::RMSpropOptions*>(&options))
    return Eps{"RMSprop", rmsprop->eps()};
  if (const auto* const adagrad = dynamic_cast<const torch::optim::AdagradOptions*>(&options))
    return Eps{"Adagrad", adagrad->eps()};
  return std::nullopt;
}

bool has_fp16(const torch::optim::OptimizerParamGroup& group) {
  return std::any_of(group.params().begin(), group.params().end(), [](const at::Tensor& parameter) {
    return parameter.scalar_type() == at::kHalf;
  });
}

// Half of fp16's smallest number: the tie rounds to the even one of the two, 0.
constexpr float kLargestThatRoundsToZero = 0x1p-25F;

}  // namespace

void warn_of_small_eps(const OptimizerRefs& optimizers) {
  if (!is_first_rank()) return;
  for (torch::optim::Optimizer& optimizer : optimizers) {
    for (const auto& group : optimizer.param_groups()) {
      const auto eps = eps_of(group.options());
      if (!eps.has_value() || !has_fp16(group)) continue;
      if (static_cast<float>(eps->value) > kLargestThatRoundsToZero) continue;
      log()->warn(
          "{}'s eps {:g} is 0 in float16: the step of a weight whose gradient is 0 is 0/0 = NaN. "
          "Set an eps that float16 can represent, such as 6e-5, or use O2, which steps in float32",
          eps->optimizer, eps->value);
      return;
    }
  }
}

}  // namespace semitone::amp
