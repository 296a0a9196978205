// Gradient accumulation on several processes: the gradients of a batch's parts add up on each rank,
// and one message for each bucket averages them in the last part.
#include <semitone/launch/spawn.h>
#include <semitone/semitone.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>
#include <string>

namespace amp = semitone::amp;
namespace comm = semitone::comm;
namespace parallel = semitone::parallel;
namespace zoo = semitone::zoo;

namespace {

void train(const std::string& data_dir) {
  const auto data = zoo::load_mnist(data_dir, zoo::Split::train);
  const comm::Group group = comm::init();
  torch::manual_seed(0);
  zoo::ConvNet model;
  model->to(group.device());
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto mixed = amp::initialize(model, optimizer, amp::Options("O2").verbosity(0));
  parallel::DistributedDataParallel ddp(model, group);

  const int64_t parts = 4;
  const int64_t rows = 25;  // of a part, on each rank
  double first = 0;
  double last = 0;
  for (int64_t step = 0; step < 40; ++step) {
    mixed.zero_grad(optimizer);
    // The mean over the parts. All but the last one run in the scope of ddp.no_sync().
    const auto loss = amp::accumulate(mixed, optimizer, ddp, parts, [&](int64_t part) {
      const int64_t begin = ((step * parts + part) * group.size() + group.rank()) * rows;
      const auto images =
          data.images.narrow(0, begin, rows).unsqueeze(1).to(torch::kFloat).div_(255);
      return torch::cross_entropy_loss(mixed.forward(ddp, images.to(group.device())),
                                       data.labels.narrow(0, begin, rows).to(group.device()));
    });
    mixed.step(optimizer);
    (step == 0 ? first : last) = loss.item<double>();
  }
  if (group.rank() == 0) std::cout << "loss " << first << " -> " << last << '\n';
  if (last > first / 2) throw semitone::Error("train", "half the first loss", std::to_string(last));
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string data_dir = argc > 1 ? argv[1] : "data/mnist";
  return semitone::launch::spawn([&](int) { train(data_dir); }, 2).exit_code();
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
