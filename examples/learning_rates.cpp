// The learning rates of some schedules, step by step. A training calls step() after each step that
// was not skipped: training_loop.cpp.
#include <semitone/optim.h>

#include <torch/torch.h>

#include <cstdint>
#include <iostream>
#include <utility>
#include <vector>

namespace optim = semitone::optim;

int main() try {
  const auto weight = torch::ones({1}, torch::requires_grad());
  const std::vector<std::pair<const char*, optim::LRSchedule>> schedules = {
      {"linear", optim::LinearLR(4)},
      {"cosine", optim::CosineAnnealingLR(8).eta_min(0.01)},
      {"polynomial", optim::PolynomialLR(8).power(2)},
      {"steps", optim::StepLR(3).gamma(0.5)},
      {"milestones", optim::MultiStepLR({2, 6})},
      {"one cycle", optim::OneCycleLR(9)},  // the optimizer's rate is the largest
      {"your own", optim::LambdaLR([](std::int64_t step) { return 1.0 / double(step + 1); })},
      {"warm-up, then cosine",
       optim::SequentialLR({optim::LinearLR(3), optim::CosineAnnealingLR(5)}, {3})},
  };
  for (const auto& [name, schedule] : schedules) {
    torch::optim::SGD optimizer({weight}, 0.1);
    optim::LRScheduler scheduler(optimizer, schedule);
    std::cout << name << ':';
    for (int step = 0; step < 8; ++step) {
      std::cout << ' ' << scheduler.get_last_lr()[0];
      scheduler.step();
    }
    std::cout << '\n';
  }

  // A scheduler of LibTorch, which follows the loss. It changes the rate itself.
  torch::optim::SGD optimizer({weight}, 0.1);
  torch::optim::ReduceLROnPlateauScheduler plateau(
      optimizer, torch::optim::ReduceLROnPlateauScheduler::min, /*factor=*/0.1F, /*patience=*/1);
  for (const float loss : {2.F, 1.F, 1.F, 1.F, 1.F}) plateau.step(loss);
  const double reduced = optimizer.param_groups()[0].options().get_lr();
  std::cout << "after a plateau: " << reduced << '\n';
  return reduced < 0.05 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
