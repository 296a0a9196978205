// A training that diverges, and goes back to its last good checkpoint with a lower learning rate.
#include <semitone/semitone.h>

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <random>
#include <string>

namespace amp = semitone::amp;
namespace checkpoint = semitone::checkpoint;
namespace comm = semitone::comm;

int main() try {
  const comm::Group group = comm::init();  // one process, unless a launcher started several
  const auto directory =
      std::filesystem::temp_directory_path() / ("run-" + std::to_string(std::random_device{}()));
  torch::manual_seed(0);
  torch::nn::Linear model(16, 1);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed =
      amp::initialize(model, optimizer, amp::Options("O1").dtype(torch::kBFloat16).verbosity(0));
  const auto x = torch::randn({64, 16});
  const auto y = x.mm(torch::randn({16, 1}));

  // Keeps the two newest checkpoints, and the one with the lowest loss.
  checkpoint::Checkpoint saved(directory, checkpoint::CheckpointOptions().keep(2).keep_best(1));
  saved.add("model", model).add("optimizer", optimizer).add("mixed", mixed);

  std::int64_t step = 0;
  double lr = 0.1;
  amp::DivergenceGuard guard(
      amp::DivergenceGuardOptions()
          .max_loss_ratio(10)  // to the mean of the losses before
          .max_consecutive_spikes(3)
          .warmup_steps(5)
          .max_rollbacks(2)
          .agree([&](torch::Tensor& loss) { group.all_reduce(loss, comm::ReduceOp::mean); })
          .rollback([&](const semitone::DivergedError& error) {
            std::cout << error.what() << '\n';
            step = saved.resume().value_or(0);
            lr = 0.05;
          }));
  double last = 0;
  while (step < 60) {
    if (step == 30 && guard.rollbacks() == 0) lr = 100;  // a mistake
    optimizer.param_groups()[0].options().set_lr(lr);
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(mixed.forward(model, x), y);
    mixed.scale_loss(loss, optimizer).backward();
    const auto observed = guard.observe(loss, mixed.step(optimizer));
    if (observed == amp::DivergenceGuard::Observed::rolled_back) continue;  // step is the saved one
    ++step;
    if (observed != amp::DivergenceGuard::Observed::normal) continue;
    last = loss.item<double>();
    if (step % 10 == 0) saved.save(step, last);
  }
  std::cout << "loss " << last << " after " << guard.rollbacks() << " rollback, best step "
            << saved.best_step().value_or(0) << '\n';
  std::filesystem::remove_all(directory);
  return guard.rollbacks() == 1 && last < 0.1 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
