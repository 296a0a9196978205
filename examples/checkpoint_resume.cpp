// A training that can be killed at any moment. Started again, it resumes from its last checkpoint,
// and ends with the same weights as if it had not been killed, bit for bit.
//
//   checkpoint_resume DIR [STEPS] [DATA_DIR]
//
// Try it: start it, press Ctrl-C, and start it again with the same arguments. The last line that it
// prints is the same for every such run. SIGTERM, which batch systems send before they end a
// program, loses nothing: the program saves a checkpoint after the step in progress, and its exit
// code is 143 (128 and the number of the signal).
#include <semitone/semitone.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;
namespace checkpoint = semitone::checkpoint;
namespace zoo = semitone::zoo;

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::cerr << "usage: checkpoint_resume DIR [STEPS] [DATA_DIR]\n";
    return 2;
  }
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 60;
  const auto data = zoo::load_mnist(argc > 3 ? argv[3] : "data/mnist", zoo::Split::train);
  torch::manual_seed(0);
  zoo::ConvNet model;
  semitone::optim::FusedAdam optimizer(model->parameters(), 1e-3);
  auto mixed = amp::initialize(model, optimizer, amp::Options("O2").verbosity(0));
  const auto size = static_cast<std::size_t>(data.size());
  const auto order =
      semitone::parallel::DistributedSamplerOptions().shuffle(true).advance_epoch(true);
  semitone::parallel::DistributedSampler sampler(size, /*num_replicas=*/1, /*rank=*/0, order);

  // Six lines, and a first step of resume() instead of 0, are all that a training loop needs for
  // this: three here, and three after mixed.step().
  const checkpoint::StopSignals signals;
  checkpoint::Checkpoint checkpoint(argv[1]);
  checkpoint.add("model", model).add("optim", optimizer).add("mixed", mixed).add("data", sampler);
  for (int64_t step = checkpoint.resume().value_or(0); step < steps; ++step) {
    auto indices = sampler.next(100);
    if (!indices.has_value()) {  // an epoch has ended, and the next one has another order
      sampler.reset();
      indices = sampler.next(100);
    }
    const auto rows = torch::tensor(std::vector<int64_t>(indices->begin(), indices->end()));
    const auto images = data.images.index_select(0, rows).unsqueeze(1).to(torch::kFloat).div_(255);
    const auto labels = data.labels.index_select(0, rows);
    optimizer.zero_grad();
    const auto loss = torch::cross_entropy_loss(mixed.forward(model, images), labels);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
    const int signal = signals.received();
    if ((step + 1) % 10 == 0 || signal != 0) checkpoint.save(step + 1);
    if (signal != 0) return 128 + signal;
  }
  double sum = 0;
  for (const auto& parameter : mixed.master_params(optimizer))
    sum += parameter.detach().to(torch::kDouble).abs().sum().item<double>();
  std::cout << std::hexfloat << "sum of all weights' magnitudes " << sum << '\n';
  return 0;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
