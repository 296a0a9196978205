#pragma once

#include "semitone/amp/initialize.h"
#include "semitone/checkpoint/checkpoint.h"
#include "semitone/core/dtype.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/parallel/sampler.h"
#include "src/autocast/model_entries.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

// A small training with everything that a resumed run must restore.
namespace semitone::checkpoint::test {

using semitone::test::same_bits;

inline constexpr const char* kOptimizers[] = {"SGD", "AdamW", "FusedAdam", "split FusedAdam"};

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& name, const std::vector<at::Tensor>& parameters) {
  if (name == "SGD") {
    return std::make_unique<torch::optim::SGD>(parameters,
                                               torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  if (name == "AdamW") return std::make_unique<torch::optim::AdamW>(parameters, 0.01);
  return std::make_unique<optim::FusedAdam>(
      parameters, optim::FusedAdamOptions(0.01).split_master(name != "FusedAdam"));
}

struct Setting {
  std::string level = "O2";
  c10::ScalarType dtype = torch::kHalf;
  std::string optimizer = "FusedAdam";
  std::uint64_t seed = 1;
  int ranks = 1;
  int rank = 0;
};

inline void PrintTo(const Setting& setting, std::ostream* stream) {
  *stream << setting.level << " " << dtype_name(setting.dtype) << " " << setting.optimizer;
}

class Training {
 public:
  explicit Training(const Setting& given)
      : setting(given),
        net(make_net(given.seed)),
        optimizer(make_optimizer(given.optimizer, net->parameters())),
        mixed(amp::initialize(
            net, *optimizer,
            amp::Options(given.level).dtype(given.dtype).loss_scale("dynamic").verbosity(0))),
        sampler(kImages, given.ranks, given.rank) {}

  Checkpoint checkpoint(const std::filesystem::path& folder, CheckpointOptions options = {}) {
    // At O3 the eps of LibTorch's AdamW is 0 in fp16, and some weights become inf.
    options.nonfinite_weights(true);
    Checkpoint made(folder, options);
    made.add("model", net)
        .add("optimizer", *optimizer)
        .add("mixed", mixed)
        .add("sampler", sampler)
        .add("loss_sum", loss_sum, PerRank::yes);
    return made;
  }

  // Trains until `step` has this value. The gradients of some steps overflow.
  void train_to(std::int64_t end) {
    for (; step < end; ++step) {
      auto indices = sampler.next(4);
      if (!indices.has_value()) {
        sampler.set_epoch(sampler.epoch() + 1);
        sampler.reset();
        indices = sampler.next(4);
      }
      train_on(*indices);
    }
  }

  // Weights, buffers, masters and counters.
  std::vector<at::Tensor> state() {
    std::vector<at::Tensor> all;
    for (const auto& entry : amp::entries_of(amp::Model(net))) all.push_back(entry.tensor.clone());
    for (const at::Tensor& p : mixed.master_params(*optimizer)) all.push_back(p.detach().clone());
    const auto skipped = static_cast<double>(mixed.skipped_steps());
    all.push_back(torch::tensor({loss_sum, skipped, mixed.loss_scaler().scale()}, torch::kDouble));
    return all;
  }

  Setting setting;
  semitone::test::DropNet net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  amp::MixedPrecision mixed;
  parallel::DistributedSampler sampler;
  double loss_sum = 0;
  std::int64_t step = 0;
  std::function<void()> before_step = [] {};

 private:
  static constexpr std::int64_t kImages = 24;

  static semitone::test::DropNet make_net(std::uint64_t seed) {
    torch::manual_seed(seed);
    return semitone::test::DropNet();
  }

  void train_on(const std::vector<std::size_t>& indices) {
    std::vector<std::int64_t> rows(indices.begin(), indices.end());
    const at::Tensor index = torch::tensor(rows);
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    const auto images = torch::randn({kImages, 1, 28, 28}, generator).index_select(0, index);
    optimizer->zero_grad();
    const auto value = torch::cross_entropy_loss(mixed.forward(net, images), index.remainder(10));
    auto loss = mixed.scale_loss(value, *optimizer);
    loss.value().backward();
    if (step % 5 == 3) {
      for (const at::Tensor& p : net->parameters())
        p.mutable_grad().view(-1)[0] = std::numeric_limits<float>::infinity();
    }
    loss.finish();
    loss_sum += value.item<double>();
    before_step();
    mixed.step(*optimizer);
  }
};

}  // namespace semitone::checkpoint::test
