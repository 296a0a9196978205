// Optimizers that do a whole step in one pass over memory: each of them at O2, and functions for
// gradients that a program without amp::initialize calls.
#include <semitone/amp.h>
#include <semitone/optim.h>

#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace amp = semitone::amp;
namespace optim = semitone::optim;

namespace {

using Parameters = std::vector<torch::Tensor>;
using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(Parameters)>;

template <typename Optimizer, typename OptimizerOptions>
Make with(const OptimizerOptions& options) {
  return [options](Parameters parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(16, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, 4));
}

// Trains a model at O2 in bf16, whose fp32 masters the optimizer steps. Returns whether it learned.
bool train(const std::string& name, const Make& make) {
  auto model = make_model();
  const auto optimizer = make(model->parameters());
  auto mixed =
      amp::initialize(model, *optimizer, amp::Options("O2").dtype(torch::kBFloat16).verbosity(0));
  const auto x = torch::randn({64, 16});
  const auto y = torch::randn({64, 4});
  double first = 0;
  double last = 0;
  for (int step = 0; step < 60; ++step) {
    optimizer->zero_grad();
    const auto loss = torch::mse_loss(mixed.forward(model, x), y);
    mixed.scale_loss(loss, *optimizer).backward();
    mixed.clip_grad_norm_(*optimizer, 1.0);
    mixed.step(*optimizer);
    (step == 0 ? first : last) = loss.item<double>();
  }
  std::cout << name << ": loss " << first << " -> " << last << '\n';
  return last < 0.9 * first;
}

}  // namespace

int main() try {
  const std::vector<std::pair<std::string, Make>> optimizers = {
      {"FusedAdam", with<optim::FusedAdam>(optim::FusedAdamOptions(1e-2).weight_decay(0.01))},
      {"FusedAdam, masters and weights share their upper halves",
       with<optim::FusedAdam>(optim::FusedAdamOptions(1e-2).split_master(true))},
      {"FusedAdam, state in bf16",
       with<optim::FusedAdam>(optim::FusedAdamOptions(1e-2).bf16_state(true))},
      {"FusedSGD",
       with<optim::FusedSGD>(optim::FusedSGDOptions(0.1).momentum(0.9).wd_after_momentum(true))},
      {"FusedLAMB", with<optim::FusedLAMB>(optim::FusedLAMBOptions(2e-2).max_grad_norm(1))},
      {"FusedNovoGrad", with<optim::FusedNovoGrad>(optim::FusedNovoGradOptions(0.1))},
      {"FusedAdagrad", with<optim::FusedAdagrad>(optim::FusedAdagradOptions(2e-2))},
      {"LARC around SGD",
       with<optim::LARC>(optim::LARCOptions(0.1).momentum(0.9).trust_coefficient(0.02))},
  };
  bool right = true;
  for (const auto& [name, make] : optimizers) right = train(name, make) && right;

  // Without amp::initialize, each in one pass: norms, clipping, and a step that does both itself.
  auto model = make_model();
  optim::FusedAdam optimizer(model->parameters(), 1e-2);
  const auto backward = [&] {
    optimizer.zero_grad();
    (1024 * model->forward(torch::ones({8, 16})).square().sum()).backward();  // a scaled loss
  };
  backward();
  const double scaled = optim::grad_norm(model->parameters());
  optim::scale_grads_(model->parameters(), 1 / 1024.);
  const double norm = optim::clip_grad_norm_(model->parameters(), 1.0);
  right =
      right && std::abs(scaled / norm - 1024) < 1 && optim::grad_norm(model->parameters()) < 1.01;
  optimizer.step();
  backward();
  const double clip = optim::clip_factor(optim::grad_norm(model->parameters()) / 1024, 1.0);
  right = optimizer.step(optim::FusedStep().inv_scale(1 / 1024.).clip(clip)) && right;
  std::cout << "norm " << norm << ", clipped by " << clip << '\n';

  // The two halves of clipping, without a wait for a GPU in between.
  backward();
  std::vector<torch::Tensor> grads;
  for (const auto& parameter : model->parameters()) grads.push_back(parameter.grad());
  optim::clip_grads_with_norm_(model->parameters(), 1.0, optim::get_total_norm(grads));
  right = right && std::abs(optim::grad_norm(model->parameters()) - 1) < 0.01;
  return right ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
