// One process, several devices: torch.nn.DataParallel for C++, with mixed precision. It uses all
// GPUs of the machine, or else two replicas in threads of the CPU. In PyTorch:
// python/data_parallel.py.
//
//   data_parallel [DATA_DIR]
#include <semitone/semitone.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;
namespace parallel = semitone::parallel;
namespace zoo = semitone::zoo;

int main(int argc, char** argv) try {
  const auto data = zoo::load_mnist(argc > 1 ? argv[1] : "data/mnist", zoo::Split::train);
  const auto device = semitone::default_device();
  torch::manual_seed(0);
  zoo::ConvNet model;
  model->to(device);
  parallel::DataParallelOptions options;
  if (device == torch::kCPU) options.replicas(2);
  parallel::DataParallel replicas(model, options);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto mixed = amp::initialize(model, optimizer, amp::Options(amp::OptLevel::O2).verbosity(0));

  const int64_t batch = 100;
  double first = 0;
  double last = 0;
  for (int64_t step = 0; step < 50; ++step) {
    const auto images =
        data.images.narrow(0, step * batch, batch).unsqueeze(1).to(device, torch::kFloat).div_(255);
    const auto labels = data.labels.narrow(0, step * batch, batch).to(device);
    optimizer.zero_grad();
    const auto loss = torch::cross_entropy_loss(mixed.forward(replicas, images), labels);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
    (step == 0 ? first : last) = loss.item<double>();
  }
  std::cout << replicas.devices().size() << " replicas, loss " << first << " -> " << last << '\n';
  return last < first / 2 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
