#pragma once

#include "semitone/amp/initialize.h"
#include "semitone/checkpoint/checkpoint.h"
#include "semitone/comm/group.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
#include "semitone/parallel/sampler.h"
#include "semitone/parallel/zero_redundancy_optimizer.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// A small training of several ranks, with everything that a resumed run must restore.
namespace semitone::checkpoint::test {

inline CheckpointOptions options_of(const comm::Group& group) {
  return CheckpointOptions().group(group);
}

struct DataParallelSetting {
  std::string level = "O2";
  at::ScalarType dtype = torch::kBFloat16;
  bool sharded = false;       // the optimizer
  bool split_master = false;  // the optimizer's option
  parallel::DistributedDataParallelOptions ddp = {};
};

// Own random numbers and own data on each rank; the same gradients, hence the same weights.
struct DataParallelTraining {
  DataParallelTraining(const comm::Group& given, std::uint64_t seed,
                       const DataParallelSetting& setting = {})
      : group(given),
        net(made(seed)),
        optimizer(optimizer_of(setting)),
        mixed(amp::initialize(net, *optimizer,
                              amp::Options(setting.level).dtype(setting.dtype).verbosity(0))),
        ddp(net, group, setting.ddp),
        sampler(16, group.size(), group.rank()) {
    torch::manual_seed(seed * 100 + static_cast<std::uint64_t>(group.rank()));
  }

  static semitone::test::DropNet made(std::uint64_t seed) {
    torch::manual_seed(seed);
    return semitone::test::DropNet();
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer_of(const DataParallelSetting& setting) {
    const auto make = [options = optim::FusedAdamOptions(0.01).split_master(setting.split_master)](
                          std::vector<torch::optim::OptimizerParamGroup> groups)
        -> std::unique_ptr<torch::optim::Optimizer> {
      return std::make_unique<optim::FusedAdam>(std::move(groups), options);
    };
    if (!setting.sharded) return make({torch::optim::OptimizerParamGroup(net->parameters())});
    return std::make_unique<parallel::ZeroRedundancyOptimizer>(net->parameters(), make, group);
  }

  Checkpoint checkpoint(const std::filesystem::path& folder, bool copy_in_background = false) {
    Checkpoint made = checkpoint_without_order(folder, copy_in_background);
    made.add("ddp", ddp);
    return made;
  }
  Checkpoint checkpoint_without_order(const std::filesystem::path& folder,
                                      bool copy_in_background = false) {
    Checkpoint made(folder, options_of(group).copy_in_background(copy_in_background));
    made.add("model", net).add("optimizer", *optimizer).add("mixed", mixed);
    made.add("sampler", sampler).add("sum", sum, PerRank::yes);
    return made;
  }

  void train_to(std::int64_t end) {
    for (; step < end; ++step) {
      auto indices = sampler.next(2);
      if (!indices.has_value()) {
        sampler.set_epoch(sampler.epoch() + 1);
        sampler.reset();
        indices = sampler.next(2);
      }
      const at::Tensor images = torch::randn({2, 1, 28, 28});
      optimizer->zero_grad();
      const at::Tensor loss =
          mixed.forward(ddp, images).pow(2).mean() * static_cast<double>(1 + indices->front());
      mixed.scale_loss(loss, *optimizer).backward();
      before_step();
      mixed.step(*optimizer);
      sum += loss.item<double>();
    }
  }

  std::vector<at::Tensor> state() {
    std::vector<at::Tensor> all = semitone::test::copies(net->parameters());
    for (const at::Tensor& p : mixed.master_params(*optimizer)) all.push_back(p.detach().clone());
    for (const at::Tensor& b : net->buffers()) all.push_back(b.clone());
    all.push_back(torch::tensor({sum}, torch::kDouble));
    return all;
  }

  comm::Group group;
  semitone::test::DropNet net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  amp::MixedPrecision mixed;
  parallel::DistributedDataParallel<semitone::test::DropNet> ddp;
  parallel::DistributedSampler sampler;
  double sum = 0;
  std::int64_t step = 0;
  std::function<void()> before_step = [] {};
};

}  // namespace semitone::checkpoint::test
