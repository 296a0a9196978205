// Several backward passes before the gradients are unscaled, as with Apex's delay_unscale: two
// models with an optimizer each, and losses with two loss scales.
#include <semitone/amp.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;

int main() try {
  torch::manual_seed(0);
  torch::nn::Linear model1(16, 4);
  torch::nn::Linear model2(16, 4);
  torch::optim::SGD optimizer1(model1->parameters(), 0.05);
  torch::optim::SGD optimizer2(model2->parameters(), 0.05);
  auto mixed = amp::initialize({model1, model2}, {optimizer1, optimizer2},
                               amp::Options("O2").dtype(torch::kHalf).num_losses(2).verbosity(0));
  const auto x = torch::randn({64, 16});
  const auto y = torch::randn({64, 4});
  double first = 0;
  double last = 0;
  for (int step = 0; step < 100; ++step) {
    optimizer1.zero_grad();
    optimizer2.zero_grad();
    const auto output1 = mixed.forward(model1, x);
    const auto output2 = mixed.forward(model2, x);
    const auto loss1 = torch::mse_loss(output1, y);
    const auto loss2 = torch::mse_loss(output2, y);
    const auto apart = torch::mse_loss(output1, output2);

    // This loss has a scale of its own, so its gradients are unscaled at once.
    const auto own = amp::ScaleLossOptions().loss_id(1);
    mixed.scale_loss(apart, {optimizer1, optimizer2}, own).backward({}, /*retain_graph=*/true);
    // These share a scale: their scaled gradients add up, and the last pass unscales the sum.
    const auto delayed = amp::ScaleLossOptions().loss_id(0).delay_unscale(true);
    mixed.scale_loss(loss1, {optimizer1, optimizer2}, delayed).backward();
    mixed.scale_loss(loss2, {optimizer1, optimizer2}).backward();
    mixed.step(optimizer1);
    mixed.step(optimizer2);
    (step == 0 ? first : last) = (loss1 + loss2 + apart).item<double>();
  }
  std::cout << "loss " << first << " -> " << last << ", skipped " << mixed.skipped_steps() << '\n';
  return last < 0.75 * first ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
