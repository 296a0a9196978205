// Data-parallel training without a wrapper: the program sends the weights and averages the
// gradients itself. parallel::DistributedDataParallel does both, and averages during backward
// (spawn.cpp).
#include <semitone/launch/spawn.h>
#include <semitone/semitone.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <cstdint>
#include <iostream>
#include <string>

namespace amp = semitone::amp;
namespace comm = semitone::comm;
namespace zoo = semitone::zoo;

namespace {

void train(const std::string& data_dir) {
  const auto data = zoo::load_mnist(data_dir, zoo::Split::train);
  const comm::Group group = comm::init();
  torch::manual_seed(static_cast<std::uint64_t>(group.rank()));
  zoo::ConvNet model;
  model->to(group.device());
  group.broadcast(model->parameters());  // all ranks begin with rank 0's weights
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  amp::GradScaler scaler;
  // If a gradient overflows on one rank, all ranks skip the step. The averaged gradients would show
  // it too; gradients that are clipped, or sent in part, may not.
  scaler.set_found_inf_hook(
      [&](at::Tensor& found_inf) { group.all_reduce(found_inf, comm::ReduceOp::max); });

  const int64_t batch = 100 / group.size();
  double first = 0;
  double last = 0;
  for (int64_t step = 0; step < 100; ++step) {
    const int64_t begin = (step * group.size() + group.rank()) * batch;
    const auto images =
        data.images.narrow(0, begin, batch).unsqueeze(1).to(torch::kFloat).div_(255);
    const auto labels = data.labels.narrow(0, begin, batch).to(group.device());
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const amp::Autocast region(group.device().type(), torch::kHalf);
      loss = torch::cross_entropy_loss(model->forward(images.to(group.device())), labels);
    }
    scaler.scale(loss).backward();
    for (auto& parameter : model->parameters())
      group.all_reduce(parameter.mutable_grad(), comm::ReduceOp::mean);
    scaler.step(optimizer);
    scaler.update();
    (step == 0 ? first : last) = loss.item<double>();
  }
  const auto weights =
      group.all_gather(torch::nn::utils::parameters_to_vector(model->parameters()));
  if (group.rank() == 0) {
    std::cout << "loss " << first << " -> " << last << ", skipped "
              << scaler.scaler().skipped_steps() << '\n';
  }
  if (last > first / 2) throw semitone::Error("train", "half the first loss", std::to_string(last));
  if (!weights.front().equal(weights.back()))
    throw semitone::Error("train", "the same weights on all ranks", "others");
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string data_dir = argc > 1 ? argv[1] : "data/mnist";
  return semitone::launch::spawn([&](int) { train(data_dir); }, 2).exit_code();
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
