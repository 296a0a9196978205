// BatchNorm over processes: the layer with its options, a residual and a ReLU in the same pass, and
// statistics of a part of the ranks.
#include <semitone/launch/spawn.h>
#include <semitone/semitone.h>

#include <torch/torch.h>

#include <iostream>

namespace comm = semitone::comm;
namespace nn = semitone::nn;
namespace parallel = semitone::parallel;

namespace {

void run() {
  const comm::Group group = comm::init();
  torch::manual_seed(0);
  const auto whole = torch::randn({8, 4, 5, 5});
  const auto residual = torch::randn({8, 4, 5, 5});
  const int64_t rows = 8 / group.size();
  const auto share = [&](const torch::Tensor& tensor) {
    return tensor.narrow(0, group.rank() * rows, rows).to(group.device());
  };

  parallel::SyncBatchNorm bn(nn::FusedBatchNormOptions(4).relu(true), group);
  bn->to(group.device());
  const auto output = bn(share(whole), share(residual));

  // The same as one process with all rows.
  torch::nn::BatchNorm2d one(4);
  const auto expected = torch::relu(one(whole) + residual);
  const auto difference =
      (output.cpu() - expected.narrow(0, group.rank() * rows, rows)).abs().max().item<double>();

  // Statistics of a part of the ranks, as of one machine. Here each part is one rank.
  parallel::SyncBatchNorm alone(nn::FusedBatchNormOptions(4), group.split(1));
  torch::nn::BatchNorm2d reference(4);
  const bool own = alone(share(whole).cpu()).allclose(reference(share(whole).cpu()), 1e-4, 1e-5);

  // Converts every BatchNorm layer of an existing model.
  torch::nn::Sequential model(torch::nn::Conv2d(4, 4, 3), torch::nn::BatchNorm2d(4));
  const auto converted = parallel::convert_sync_batchnorm(*model, group);
  if (group.rank() == 0) {
    std::cout << "differs from one process by " << difference << ", " << converted
              << " layer converted\n";
  }
  if (difference > 1e-4 || !own || converted != 1)
    throw semitone::Error("sync_batch_norm", "the results of one process", "others");
}

}  // namespace

int main() try {
  return semitone::launch::spawn([](int) { run(); }, 2).exit_code();
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
