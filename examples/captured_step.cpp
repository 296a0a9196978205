// Captures a training step in a CUDA graph. On a CPU the same program runs it operator by operator.
//
//   captured_step [DATA_DIR]
#include <semitone/optim/fused_adam.h>
#include <semitone/semitone.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>
#include <vector>

namespace amp = semitone::amp;
namespace zoo = semitone::zoo;

int main(int argc, char** argv) try {
  const auto data = zoo::load_mnist(argc > 1 ? argv[1] : "data/mnist", zoo::Split::train);
  torch::manual_seed(0);
  zoo::ConvNet model;
  model->to(semitone::default_device());
  semitone::optim::FusedAdam optimizer(model->parameters(), 1e-3);
  auto mixed = amp::initialize(model, optimizer, amp::Options("O2"));

  amp::CapturedStep step(
      mixed, optimizer,
      [&](const std::vector<torch::Tensor>& batch) {
        const auto images = batch[0].unsqueeze(1).to(torch::kFloat).div_(255);
        return torch::cross_entropy_loss(mixed.forward(model, images), batch[1]);
      },
      amp::CapturedStepOptions().max_grad_norm(5));

  const int64_t size = 100;
  torch::Tensor first;
  torch::Tensor last;
  int64_t skipped = 0;
  for (int64_t i = 0; i < 100; ++i) {
    const auto [loss, outcome] =
        step.run({data.images.narrow(0, i * size, size), data.labels.narrow(0, i * size, size)});
    skipped += outcome == amp::Step::skipped ? 1 : 0;
    (i == 0 ? first : last) = loss;
  }
  std::cout << (step.is_captured() ? "captured" : "by operators") << ": loss "
            << first.item<double>() << " -> " << last.item<double>() << ", skipped " << skipped
            << '\n';
  return last.item<double>() < first.item<double>() / 2 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
