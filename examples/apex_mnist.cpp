// Opt levels, as Apex users know them: the MNIST program of the Apex examples, in C++. In PyTorch:
// python/apex_mnist.py.
//
//   apex_mnist [O0|O1|O2|O3] [DATA_DIR]
#include <semitone/amp.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;
namespace zoo = semitone::zoo;

int main(int argc, char** argv) try {
  const std::string level = argc > 1 ? argv[1] : "O2";
  const std::string data_dir = argc > 2 ? argv[2] : "data/mnist";
  torch::manual_seed(0);
  const auto data = zoo::load_mnist(data_dir, zoo::Split::train);

  zoo::ConvNet model;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto mixed = amp::initialize(model, optimizer, amp::Options(level));

  const int64_t batch = 100;
  double first = 0;
  double last = 0;
  for (int64_t step = 0; step < 100; ++step) {
    const auto images =
        data.images.narrow(0, step * batch, batch).unsqueeze(1).to(torch::kFloat).div_(255);
    const auto labels = data.labels.narrow(0, step * batch, batch);
    optimizer.zero_grad();
    const auto loss = torch::cross_entropy_loss(mixed.forward(model, images), labels);
    mixed.scale_loss(loss, optimizer).backward();
    torch::nn::utils::clip_grad_norm_(mixed.master_params(optimizer), 5.0);
    mixed.step(optimizer);
    (step == 0 ? first : last) = loss.item<double>();
  }
  std::cout << level << ": loss " << first << " -> " << last << ", skipped "
            << mixed.skipped_steps() << '\n';
  return last < first / 2 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
