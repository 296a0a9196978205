#pragma once

#include <torch/optim.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace semitone::test {

// LibTorch's optimizers, except those that evaluate the loss inside their step, with settings that
// use all of their state.
struct OptimizerKind {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)> make;
};

template <typename Optimizer, typename Options>
OptimizerKind optimizer_kind(std::string name, const Options& options) {
  return {std::move(name), [options](std::vector<at::Tensor> parameters) {
            return std::make_unique<Optimizer>(std::move(parameters), options);
          }};
}

inline std::vector<OptimizerKind> all_optimizers() {
  namespace optim = torch::optim;
  return {
      optimizer_kind<optim::SGD>("SGD", optim::SGDOptions(0.05)),
      optimizer_kind<optim::SGD>("SGDMomentum",
                                 optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01)),
      optimizer_kind<optim::Adam>("Adam", optim::AdamOptions(0.01).weight_decay(0.01)),
      optimizer_kind<optim::AdamW>("AdamW", optim::AdamWOptions(0.01).amsgrad(true)),
      optimizer_kind<optim::Adagrad>("Adagrad", optim::AdagradOptions(0.05)),
      optimizer_kind<optim::RMSprop>("RMSprop",
                                     optim::RMSpropOptions(0.01).momentum(0.9).centered(true)),
  };
}

inline std::string name_of(const OptimizerKind& kind) {
  return kind.name;
}
inline void PrintTo(const OptimizerKind& kind, std::ostream* stream) {
  *stream << kind.name;
}

// An optimizer of a program that never saves: neither its state nor its options have a serialize(),
// and LibTorch raises where it is asked to save them.
struct OwnState : torch::optim::OptimizerCloneableParamState<OwnState> {
  at::Tensor momentum;
};
struct OwnOptions : torch::optim::OptimizerCloneableOptions<OwnOptions> {};
class OwnOptimizer : public torch::optim::Optimizer {
 public:
  explicit OwnOptimizer(std::vector<at::Tensor> parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<OwnOptions>()) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : param_groups_[0].params()) {
      if (!parameter.grad().defined()) continue;
      auto& state = state_[parameter.unsafeGetTensorImpl()];
      if (state == nullptr) state = std::make_unique<OwnState>();
      auto& momentum = static_cast<OwnState&>(*state).momentum;
      momentum = momentum.defined() ? momentum * 0.5 + parameter.grad() : parameter.grad().clone();
      parameter.sub_(momentum, 0.01);
    }
    return {};
  }
};

}  // namespace semitone::test
