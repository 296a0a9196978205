#pragma once

#include "semitone/optim/fused_optimizer.h"
#include "src/kernels/multi_tensor_update.h"

#include <array>
#include <span>
#include <vector>

namespace semitone::optim {

// One parameter of a step, ready for a kernel.
struct FusedOptimizer::Work {
  const torch::optim::OptimizerOptions* options;
  FusedState* state;
  kernels::Update update;       // update.state: the state's tensors, but not its numbers
  double grad_scale = 1;        // what the gradient is multiplied by
  std::array<bool, 3> fresh{};  // state that was made in this step

  template <typename Options>
  const Options& options_as() const {
    return static_cast<const Options&>(*options);  // check() has seen them
  }
};

// The items of all parameters, and rule_of(work) for each.
template <typename Work, typename RuleOf>
auto items_and_rules(std::span<Work> work, const RuleOf& rule_of) {
  using Rule = decltype(rule_of(work.front()));
  std::pair<std::vector<kernels::Update>, std::vector<Rule>> lists;
  lists.first.reserve(work.size());
  lists.second.reserve(work.size());
  for (Work& one : work) {
    lists.first.push_back(one.update);
    lists.second.push_back(rule_of(one));
  }
  return lists;
}

}  // namespace semitone::optim
