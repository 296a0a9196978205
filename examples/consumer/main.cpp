// A linear model learns y = 3x + 1 at O1: the smallest program that uses an installed Semitone.
#include <semitone/semitone.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;

int main() {
  torch::manual_seed(0);
  torch::nn::Linear model(1, 1);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = amp::initialize(model, optimizer, amp::Options(amp::OptLevel::O1).verbosity(0));
  const auto x = torch::rand({256, 1});
  const auto y = 3 * x + 1;
  for (int step = 0; step < 500; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(mixed.forward(model, x), y);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
  }
  std::cout << "y = " << model->weight.item<float>() << " x + " << model->bias.item<float>()
            << '\n';
  const bool learned = std::abs(model->weight.item<float>() - 3) < 0.1 &&
                       std::abs(model->bias.item<float>() - 1) < 0.1;
  return learned ? 0 : 1;
}
