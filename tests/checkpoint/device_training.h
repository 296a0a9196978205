#pragma once

#include "semitone/amp/initialize.h"
#include "semitone/checkpoint/checkpoint.h"
#include "src/autocast/model_entries.h"
#include "src/optim/fused_state.h"
#include "tests/checkpoint/training.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"
#include "tests/support/toy_nets.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

// A training on any device, and what its checkpoints must restore there.
namespace semitone::checkpoint::test {

using semitone::test::TemporaryFolder;

// Moves a model to a device. The pretend accelerator cannot use torch::nn::Module::to.
using Move = void (*)(torch::nn::Module&, c10::Device);

struct DeviceSetting {
  c10::Device device = torch::kCPU;
  Move move = nullptr;
  std::string level = "O2";
  std::string optimizer = "FusedAdam";  // of kOptimizers
  std::uint64_t seed = 1;
};

// The tensors of an optimizer's state, which are its own.
inline std::vector<at::Tensor> tensors_of(const torch::optim::OptimizerParamState& state) {
  std::vector<at::Tensor> all;
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(&state)) {
    all = {sgd->momentum_buffer()};
  } else if (const auto* adam = dynamic_cast<const torch::optim::AdamWParamState*>(&state)) {
    all = {adam->exp_avg(), adam->exp_avg_sq()};
  } else {
    const auto& fused = dynamic_cast<const optim::FusedState&>(state);
    all.assign(fused.tensors.begin(), fused.tensors.end());
    all.push_back(fused.master_low);
  }
  std::erase_if(all, [](const at::Tensor& tensor) { return !tensor.defined(); });
  return all;
}

// Those of all parameters that have a state.
inline std::vector<at::Tensor> state_tensors_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      for (const at::Tensor& tensor : tensors_of(*found->second)) all.push_back(tensor);
    }
  }
  return all;
}

inline std::vector<at::Tensor> copies_on_cpu(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors)
    copies.push_back(tensor.detach().to(torch::kCPU, /*non_blocking=*/false, /*copy=*/true));
  return copies;
}

class DeviceTraining {
 public:
  explicit DeviceTraining(const DeviceSetting& given)
      : setting(given),
        net(make_net(given)),
        optimizer(make_optimizer(given.optimizer, net->parameters())),
        mixed(amp::initialize(
            net, *optimizer,
            amp::Options(given.level).dtype(torch::kBFloat16).loss_scale("dynamic").verbosity(0))) {
  }

  Checkpoint checkpoint(const std::filesystem::path& folder,
                        const CheckpointOptions& options = {}) {
    Checkpoint made(folder, options);
    made.add("model", net).add("optimizer", *optimizer).add("mixed", mixed);
    return made;
  }

  // Trains until `step` has this value. The loss of one step overflows. The masks of dropout come
  // from the device's default generator, and the inputs do not.
  void train_to(std::int64_t end) {
    for (; step < end; ++step) {
      auto generator =
          at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 + step));
      const at::Tensor given = torch::randn({12, 9}, generator).to(setting.device);
      optimizer->zero_grad();
      const at::Tensor output = mixed.forward(net, torch::dropout(given, dropout, true));
      loss = torch::mse_loss(output.to(torch::kFloat), given.narrow(1, 0, 5));
      mixed.scale_loss(step == 1 ? loss / 0 : loss, *optimizer).backward();
      mixed.step(*optimizer);
      loss = loss.detach();
    }
  }

  // What training changes on the device: weights, buffers, masters and states of the optimizer.
  std::vector<at::Tensor> tensors() {
    std::vector<at::Tensor> all = state_tensors_of(*optimizer);
    for (const auto& entry : amp::entries_of(amp::Model(net))) all.push_back(entry.tensor.detach());
    for (const at::Tensor& master : mixed.master_params(*optimizer)) all.push_back(master.detach());
    return all;
  }

  // Copies of them on the CPU, and what MixedPrecision counts.
  std::vector<at::Tensor> state() {
    const auto skipped = static_cast<double>(mixed.skipped_steps());
    std::vector<at::Tensor> all = copies_on_cpu(tensors());
    all.push_back(torch::tensor({skipped, mixed.loss_scaler().scale()}, torch::kDouble));
    return all;
  }

  // Changes all of them in place.
  void overwrite() {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& tensor : tensors()) tensor.fill_(7);
  }

  DeviceSetting setting;
  semitone::test::ToyNet net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  amp::MixedPrecision mixed;
  at::Tensor loss;  // of the last step
  double dropout = 0.5;
  std::int64_t step = 0;

 private:
  static semitone::test::ToyNet make_net(const DeviceSetting& given) {
    torch::manual_seed(given.seed);
    semitone::test::ToyNet made = semitone::test::odd_net();
    if (!given.device.is_cpu()) given.move(*made, given.device);
    return made;
  }
};

// Resumes step 3 in new objects.
inline void resume_in(DeviceTraining& resumed, const std::filesystem::path& folder) {
  ASSERT_EQ(resumed.checkpoint(folder).resume(), 3);
  resumed.step = 3;
  for (const at::Tensor& tensor : resumed.tensors())
    EXPECT_EQ(tensor.device(), resumed.setting.device);
}

enum class Way { save, save_async, in_background };

// However a run on a device other than the CPU was saved, the resumed one ends as a run that was
// neither saved nor resumed.
inline void expect_resumed_as_undisturbed(const DeviceSetting& setting) {
  DeviceTraining undisturbed(setting);
  undisturbed.train_to(6);
  const std::vector<at::Tensor> want = undisturbed.state();
  for (const Way way : {Way::save, Way::save_async, Way::in_background}) {
    SCOPED_TRACE(c10::str(setting.level, " ", setting.optimizer, " ", static_cast<int>(way)));
    const TemporaryFolder folder;
    DeviceTraining run(setting);
    {
      auto checkpoint = run.checkpoint(
          folder / "run", CheckpointOptions().copy_in_background(way == Way::in_background));
      run.train_to(3);
      if (way == Way::save) {
        checkpoint.save(3);
        run.train_to(6);
        EXPECT_TRUE(same_bits(run.state(), want));  // saving has changed nothing
      } else {
        checkpoint.save_async(3);
        run.overwrite();  // in background too, only tensors of the CPU are left for later
        checkpoint.wait_for_copy();
        checkpoint.wait();
      }
    }
    DeviceSetting other = setting;
    other.seed = 2;
    DeviceTraining resumed(other);
    resume_in(resumed, folder / "run");
    resumed.train_to(6);
    EXPECT_TRUE(same_bits(resumed.state(), want));
  }
}

// Another device resumes with the same bits, and can train on.
inline void expect_resumed_on(c10::Device device, const DeviceSetting& setting) {
  SCOPED_TRACE(
      c10::str(setting.level, " ", setting.optimizer, ", ", setting.device, " to ", device));
  const TemporaryFolder folder;
  DeviceTraining saved(setting);
  saved.train_to(3);
  saved.checkpoint(folder / "run").save(3);
  DeviceSetting other = setting;
  other.device = device;
  other.seed = 2;
  DeviceTraining resumed(other);
  resume_in(resumed, folder / "run");
  EXPECT_TRUE(same_bits(resumed.state(), saved.state()));
  for (DeviceTraining* one : {&saved, &resumed}) {
    one->dropout = 0;  // devices draw different masks
    one->train_to(4);
  }
  EXPECT_TRUE(semitone::test::near(resumed.loss.cpu(), saved.loss.cpu(),
                                   semitone::test::rounding_tolerance(torch::kBFloat16, 20)));
}

}  // namespace semitone::checkpoint::test
