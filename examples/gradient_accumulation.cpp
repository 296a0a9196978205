// A large batch in parts, with a GradScaler: the gradients of four parts add up, still scaled, and
// then the optimizer steps once. amp::accumulate does this for amp::initialize: training_loop.cpp.
// In PyTorch: python/gradient_accumulation.py.
//
//   gradient_accumulation [DATA_DIR]
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
  zoo::ConvNet model;
  model->to(device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  amp::GradScaler scaler;

  const int64_t parts = 4;
  const int64_t rows = 25;  // of a part
  double first = 0;
  double last = 0;
  for (int64_t step = 0; step < 80; ++step) {
    double mean = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = (step * parts + part) * rows;
      const auto images =
          data.images.narrow(0, begin, rows).unsqueeze(1).to(device, torch::kFloat).div_(255);
      const auto labels = data.labels.narrow(0, begin, rows).to(device);
      torch::Tensor loss;
      {
        const amp::Autocast region(device, torch::kHalf);
        loss = torch::cross_entropy_loss(model->forward(images), labels) / parts;
      }
      scaler.scale(loss).backward();
      mean += loss.item<double>();
    }
    // After the last part only: all gradients that add up have to have the same scale.
    scaler.unscale_(optimizer);
    torch::nn::utils::clip_grad_norm_(model->parameters(), 5.0);
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
    (step == 0 ? first : last) = mean;
  }
  std::cout << "loss " << first << " -> " << last << ", scale " << scaler.get_scale()
            << ", skipped " << scaler.scaler().skipped_steps() << '\n';
  return last < first / 4 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
