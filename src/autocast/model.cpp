#include "semitone/autocast/model.h"

#include "semitone/core/error.h"

#include <utility>

namespace semitone::amp {

Model::Model(std::shared_ptr<torch::nn::Module> module) : held_(std::move(module)) {
  if (std::get<0>(held_) == nullptr) {
    throw Error("amp.initialize", "a model", "an empty module holder",
                "construct the module first");
  }
}
Model::Model(torch::nn::Module& module) : held_(&module) {}
Model::Model(torch::jit::Module module) : held_(std::move(module)) {}

torch::nn::Module* Model::module() const {
  if (const auto* shared = std::get_if<0>(&held_)) return shared->get();
  if (const auto* reference = std::get_if<1>(&held_)) return *reference;
  return nullptr;
}

const torch::jit::Module* Model::script() const {
  return std::get_if<torch::jit::Module>(&held_);
}

const void* Model::identity() const {
  const torch::nn::Module* nn_module = module();
  return nn_module != nullptr ? static_cast<const void*>(nn_module)
                              : static_cast<const void*>(std::get<2>(held_)._ivalue().get());
}

}  // namespace semitone::amp
