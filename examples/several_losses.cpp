// Two models with an optimizer each, two losses of both models, and one GradScaler: the networks
// predict together, and are kept from contradicting each other. In PyTorch:
// python/several_losses.py.
//
//   several_losses [DATA_DIR]
#include <semitone/semitone.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;
namespace zoo = semitone::zoo;

int main(int argc, char** argv) try {
  const auto data = zoo::load_mnist(argc > 1 ? argv[1] : "data/mnist", zoo::Split::train);
  const auto device = semitone::default_device();
  torch::manual_seed(0);
  zoo::ConvNet convolutions;
  torch::nn::Sequential layers(torch::nn::Flatten(), torch::nn::Linear(784, 64), torch::nn::ReLU(),
                               torch::nn::Linear(64, 64), torch::nn::ReLU(),
                               torch::nn::Linear(64, 10));
  convolutions->to(device);
  layers->to(device);
  torch::optim::SGD optimizer_c(convolutions->parameters(),
                                torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::AdamW optimizer_l(layers->parameters(), 2e-3);
  amp::GradScaler scaler;

  const int64_t batch = 100;
  const int64_t steps = 100;
  double first = 0;
  double last = 0;
  double agreement = 0;  // part of the images in which they predict the same
  for (int64_t step = 0; step < steps; ++step) {
    const auto images =
        data.images.narrow(0, step * batch, batch).unsqueeze(1).to(device, torch::kFloat).div_(255);
    const auto labels = data.labels.narrow(0, step * batch, batch).to(device);
    optimizer_c.zero_grad();
    optimizer_l.zero_grad();
    torch::Tensor together;
    torch::Tensor difference;
    {
      const amp::Autocast region(device, torch::kHalf);
      const auto a = convolutions->forward(images);
      const auto b = layers->forward(images);
      together = torch::cross_entropy_loss((a + b) / 2, labels);
      difference = 10 * torch::mse_loss(a.softmax(1), b.softmax(1));
      agreement = a.argmax(1).eq(b.argmax(1)).to(torch::kFloat).mean().item<double>();
    }
    scaler.scale(together).backward({}, /*retain_graph=*/true);  // difference has the same graph
    scaler.scale(difference).backward();                         // adds to the gradients
    // Each optimizer is unscaled on its own: here only one, to clip.
    scaler.unscale_(optimizer_c);
    torch::nn::utils::clip_grad_norm_(convolutions->parameters(), 1.0);
    scaler.step(optimizer_c);
    scaler.step(optimizer_l);  // steps even if the other one overflowed
    scaler.update();           // once, after all optimizers
    (step == 0 ? first : last) = together.item<double>();
  }
  std::cout << "loss " << first << " -> " << last << ", agreement " << agreement << ", scale "
            << scaler.get_scale() << ", skipped " << scaler.scaler().skipped_steps() << '\n';
  return last < first / 4 && agreement > 0.85 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
