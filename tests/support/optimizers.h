#pragma once

#include <torch/optim.h>

#include <functional>
#include <memory>
#include <string>
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

}  // namespace semitone::test
