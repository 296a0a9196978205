// Autocast and GradScaler, as torch.amp users know them. In PyTorch: python/torch_amp.py.
//
//   torch_amp [DATA_DIR]
#include <semitone/semitone.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;
namespace zoo = semitone::zoo;

int main(int argc, char** argv) try {
  const auto data = zoo::load_mnist(argc > 1 ? argv[1] : "data/mnist", zoo::Split::train);
  const auto device = semitone::default_device();  // torch::kCUDA, or torch::kCPU without a GPU
  torch::manual_seed(0);
  zoo::ConvNet model;
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  amp::GradScaler scaler(amp::LossScaleOptions().init_scale(65536.));
  scaler.name_parameters(model);

  const int64_t batch = 100;
  double first = 0;
  double last = 0;
  for (int64_t step = 0; step < 100; ++step) {
    const auto images =
        data.images.narrow(0, step * batch, batch).unsqueeze(1).to(device, torch::kFloat).div_(255);
    const auto labels = data.labels.narrow(0, step * batch, batch).to(device);
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const amp::Autocast region(device, torch::kHalf);
      loss = torch::cross_entropy_loss(model->forward(images), labels);
    }
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    torch::nn::utils::clip_grad_norm_(model->parameters(), 5.0);
    scaler.step(optimizer);
    scaler.update();
    (step == 0 ? first : last) = loss.item<double>();
  }
  std::cout << "loss " << first << " -> " << last << ", scale " << scaler.get_scale()
            << ", skipped " << scaler.scaler().skipped_steps() << '\n';
  return last < first / 2 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
