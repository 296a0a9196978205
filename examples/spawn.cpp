// A program that starts its own processes, as with torch.multiprocessing.spawn: no launcher is
// needed. In PyTorch: python/spawn.py.
//
//   spawn [DATA_DIR]
#include <semitone/launch/spawn.h>
#include <semitone/semitone.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>

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

  const int64_t batch = 100 / group.size();
  double first = 0;
  double last = 0;
  for (int64_t step = 0; step < 50; ++step) {
    const int64_t begin = (step * group.size() + group.rank()) * batch;
    const auto images =
        data.images.narrow(0, begin, batch).unsqueeze(1).to(torch::kFloat).div_(255);
    const auto labels = data.labels.narrow(0, begin, batch).to(group.device());
    optimizer.zero_grad();
    const auto loss =
        torch::cross_entropy_loss(mixed.forward(ddp, images.to(group.device())), labels);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
    at::Tensor mean = loss.detach().clone();
    group.all_reduce(mean, comm::ReduceOp::mean);
    (step == 0 ? first : last) = mean.item<double>();
  }
  if (group.rank() == 0) {
    std::cout << "loss " << first << " -> " << last << " on " << group.size() << " processes\n";
  }
  if (last > first / 2) throw semitone::Error("spawn", "half the first loss", std::to_string(last));
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string data_dir = argc > 1 ? argv[1] : "data/mnist";
  const auto result = semitone::launch::spawn([&](int) { train(data_dir); }, 2);
  if (result.workers.size() == 2) std::cout << "2 processes have ended\n";
  return result.exit_code();
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
