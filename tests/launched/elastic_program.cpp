// A data-parallel training that continues with any number of processes that its launcher starts,
// for elastic_test. It records which images each step takes.
//
//   elastic_program FOLDER
#include "semitone/checkpoint.h"
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/sampler.h"
#include "tests/launched/elastic_run.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

namespace checkpoint = semitone::checkpoint;
namespace comm = semitone::comm;
namespace elastic = semitone::test::elastic;
namespace fs = std::filesystem;
namespace parallel = semitone::parallel;

namespace {

int this_attempt() {
  const char* const number = std::getenv("SEMITONE_ATTEMPT");
  return number == nullptr ? 0 : std::stoi(number);
}

// Waits until the test allows more steps, or a launcher stops this process.
void wait_for_permission(const fs::path& folder, std::int64_t steps) {
  const auto allowed = [&] {
    std::int64_t number = 0;
    std::ifstream(folder / elastic::kAllowed) >> number;
    return number;
  };
  while (steps > allowed() && checkpoint::StopSignals::first() == 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

// In fp64, so that sums over two ranks differ little from sums over one.
at::Tensor made_up(std::int64_t columns, std::uint64_t seed) {
  return torch::randn({static_cast<std::int64_t>(elastic::kImages), columns},
                      at::make_generator<at::CPUGeneratorImpl>(seed), torch::kDouble);
}

// The next images of this rank, of the next epoch if this one is over.
std::vector<std::int64_t> next_images(parallel::DistributedSampler& sampler, std::size_t count) {
  auto images = sampler.next(count);
  if (!images.has_value()) {
    sampler.set_epoch(sampler.epoch() + 1);
    sampler.reset();
    images = sampler.next(count);
  }
  return {images.value().begin(), images.value().end()};
}

// Returns the signal that ended it, or 0.
int train(const fs::path& folder) {
  torch::set_num_threads(1);
  const comm::Group group = comm::init("env://", comm::InitOptions().backend("gloo"));
  const checkpoint::StopSignals signals(group);
  const std::size_t batch = elastic::kBatch / static_cast<std::size_t>(group.size());
  const at::Tensor images = made_up(8, 1);
  const at::Tensor targets = made_up(4, 2);

  torch::manual_seed(3);
  torch::nn::Linear model(8, 4);
  model->to(torch::kDouble);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  parallel::DistributedDataParallel ddp(model, group);
  parallel::DistributedSampler sampler(elastic::kImages, group.size(), group.rank());
  checkpoint::Checkpoint saved(folder / "run", checkpoint::CheckpointOptions().group(group));
  saved.add("model", model).add("optimizer", optimizer).add("ddp", ddp).add("sampler", sampler);
  std::int64_t step = saved.resume().value_or(0);

  const bool begins_early = group.rank() == 0 && group.size() > 1;
  std::ofstream(folder / elastic::started_file(this_attempt(), group.rank()))
      << group.size() << ' ' << step << ' ' << ::getpid() << std::endl;
  std::ofstream taken(folder / elastic::images_file(this_attempt(), group.rank()));
  while (step < elastic::kSteps) {
    wait_for_permission(folder, begins_early ? step : step + 1);
    ++step;
    const std::vector<std::int64_t> numbers = next_images(sampler, batch);
    taken << step;
    for (const std::int64_t number : numbers) taken << ' ' << number;
    taken << std::endl;

    const at::Tensor rows = torch::tensor(numbers);
    optimizer.zero_grad();
    torch::mse_loss(ddp.forward(images.index_select(0, rows)), targets.index_select(0, rows))
        .backward();
    optimizer.step();

    const int signal = signals.received();
    if (signal != 0 || step % elastic::kSaveEvery == 0) saved.save(step);
    if (signal != 0) return signal;
  }
  if (group.rank() == 0) torch::save(model->parameters(), (folder / elastic::kWeights).string());
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::cerr << "usage: elastic_program FOLDER\n";
    return 2;
  }
  const int signal = train(argv[1]);
  return signal == 0 ? 0 : 128 + signal;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
