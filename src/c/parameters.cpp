#include "src/c/parameters.h"

#include <cstddef>
#include <utility>

namespace semitone::c {
namespace {

struct NoOptions : torch::optim::OptimizerCloneableOptions<NoOptions> {};

}  // namespace

ParameterList::ParameterList(std::vector<at::Tensor> parameters)
    : Optimizer(std::move(parameters), std::make_unique<NoOptions>()) {}

at::Tensor ParameterList::step(LossClosure /*closure*/) {
  return {};
}

std::shared_ptr<torch::nn::Module> module_of(const std::vector<std::string>& names,
                                             const std::vector<at::Tensor>& parameters) {
  auto root = std::make_shared<torch::nn::Module>();
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::shared_ptr<torch::nn::Module> module = root;
    std::size_t begin = 0;
    for (std::size_t dot = names[i].find('.'); dot != std::string::npos;
         begin = dot + 1, dot = names[i].find('.', begin)) {
      const std::string name = names[i].substr(begin, dot - begin);
      const auto children = module->named_children();
      const auto* const child = children.find(name);
      module = child != nullptr
                   ? *child
                   : module->register_module(name, std::make_shared<torch::nn::Module>());
    }
    module->register_parameter(names[i].substr(begin), parameters[i],
                               parameters[i].requires_grad());
  }
  return root;
}

}  // namespace semitone::c
