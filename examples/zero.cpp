// Optimizer state that is sharded over the processes (ZeRO, stage 1): each rank steps its share of
// the parameters, and sends the results to the other ranks.
#include <semitone/launch/spawn.h>
#include <semitone/semitone.h>

#include <torch/torch.h>

#include <iostream>
#include <memory>
#include <string>

namespace amp = semitone::amp;
namespace comm = semitone::comm;
namespace optim = semitone::optim;
namespace parallel = semitone::parallel;

namespace {

using ParamGroups = parallel::ZeroRedundancyOptimizer::ParamGroups;

// Trains at O2 with an optimizer that `make` makes for each rank's share.
void train(const char* name, const comm::Group& group,
           const parallel::ZeroRedundancyOptimizer::Factory& make) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(32, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 4));
  model->to(group.device());
  parallel::ZeroRedundancyOptimizer optimizer(model->parameters(), make, group);
  auto mixed = amp::initialize(model, optimizer, amp::Options("O2").verbosity(0));
  parallel::DistributedDataParallel ddp(model, group);
  const auto x = torch::randn({64, 32}, group.device());
  const auto y = torch::randn({64, 4}, group.device());
  double first = 0;
  double last = 0;
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(mixed.forward(ddp, x), y);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.clip_grad_norm_(optimizer, 1.0);
    mixed.step(optimizer);
    (step == 0 ? first : last) = loss.item<double>();
  }
  optimizer.consolidate(0);  // before rank 0 saves the state of all ranks
  if (group.rank() == 0) {
    torch::serialize::OutputArchive archive;
    optimizer.save(archive);
    std::cout << name << ": loss " << first << " -> " << last << '\n';
  }
  if (last > first / 2) throw semitone::Error("zero", "half the first loss", std::to_string(last));
}

void run() {
  const comm::Group group = comm::init();
  train("FusedAdam", group, [](const ParamGroups& groups) {
    return std::make_unique<optim::FusedAdam>(groups, optim::FusedAdamOptions(1e-2));
  });
  // Its own clipping would need the gradients of all ranks, so mixed.clip_grad_norm_ does it.
  train("FusedLAMB", group, [](const ParamGroups& groups) {
    return std::make_unique<optim::FusedLAMB>(groups,
                                              optim::FusedLAMBOptions(5e-2).max_grad_norm(0));
  });
}

}  // namespace

int main() try {
  return semitone::launch::spawn([](int) { run(); }, 2).exit_code();
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
