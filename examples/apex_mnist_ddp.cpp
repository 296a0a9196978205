// Opt levels on several processes: the distributed MNIST program of the Apex examples, in C++. In
// PyTorch: python/apex_mnist_ddp.py.
//
//   semitone launch --nproc-per-node 2 apex_mnist_ddp [O0|O1|O2|O3] [DATA_DIR]
//
// torchrun --no-python, srun and mpirun start it as well; alone, it is one process.
#include <semitone/semitone.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;
namespace comm = semitone::comm;
namespace parallel = semitone::parallel;
namespace zoo = semitone::zoo;

int main(int argc, char** argv) try {
  const std::string level = argc > 1 ? argv[1] : "O2";
  const std::string data_dir = argc > 2 ? argv[2] : "data/mnist";
  const auto data = zoo::load_mnist(data_dir, zoo::Split::train);

  const comm::Group group = comm::init();  // blocks until all processes are there
  torch::manual_seed(0);
  zoo::ConvNet model;
  model->to(group.device());  // this process's GPU, or the CPU
  parallel::convert_sync_batchnorm(*model, group);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto mixed = amp::initialize(model, optimizer, amp::Options(level));
  parallel::DistributedDataParallel ddp(model, group);  // after initialize; sends rank 0's weights

  const int64_t batch = 100 / group.size();
  parallel::DistributedSampler sampler(static_cast<std::size_t>(data.size()), group.size(),
                                       group.rank());
  sampler.set_epoch(0);
  sampler.reset();
  double first = 0;
  double last = 0;
  for (int step = 0; step < 100; ++step) {
    const auto chosen = sampler.next(static_cast<std::size_t>(batch)).value();
    const auto indices =
        torch::tensor(std::vector<int64_t>(chosen.begin(), chosen.end()), torch::kLong);
    const auto images =
        data.images.index_select(0, indices).unsqueeze(1).to(torch::kFloat).div_(255);
    const auto labels = data.labels.index_select(0, indices).to(group.device());
    optimizer.zero_grad();
    const auto loss =
        torch::cross_entropy_loss(mixed.forward(ddp, images.to(group.device())), labels);
    mixed.scale_loss(loss, optimizer).backward();  // averages the gradients, then unscales
    mixed.step(optimizer);
    at::Tensor mean = loss.detach().clone();
    group.all_reduce(mean, comm::ReduceOp::mean);
    (step == 0 ? first : last) = mean.item<double>();
  }
  if (group.rank() == 0) {
    std::cout << level << " on " << group.size() << " processes: loss " << first << " -> " << last
              << ", skipped " << mixed.skipped_steps() << '\n';
  }
  return last < first / 2 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
