#include "semitone/autocast/autocast.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/parallel/data_parallel.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/zero_redundancy_optimizer.h"
#include "tests/accelerator/training.h"
#include "tests/support/tolerance.h"
#include "tests/support/toy_nets.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/optim.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

// Replicas on two devices, and the wrappers of distributed training in one process.
namespace semitone::test::accelerator {
namespace {

// LibTorch's clone() cannot: see move().
struct CloneableNetImpl : ToyNetImpl {
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& to = std::nullopt) const override {
    const auto copy = std::make_shared<CloneableNetImpl>();
    move(*copy, *to);
    const torch::NoGradGuard no_grad;
    const auto from = parameters(), into = copy->parameters();
    for (std::size_t i = 0; i < from.size(); ++i) into[i].copy_(from[i]);
    return copy;
  }
};
TORCH_MODULE(CloneableNet);

struct AcceleratorParallel : AcceleratorTest {
  static CloneableNet toy_net(c10::Device where) {
    torch::manual_seed(1);
    CloneableNet net;
    if (!where.is_cpu()) move(*net, where);
    return net;
  }
};

TEST_F(AcceleratorParallel, ReplicasOnTwoDevicesTrainAsTheModelAlone) {
  auto alone = toy_net(at::kCPU), model = toy_net(device());
  parallel::DataParallel replicas(model);
  ASSERT_EQ(replicas.devices().size(), static_cast<std::size_t>(kDevices));
  torch::optim::SGD here(alone->parameters(), 0.1), there(model->parameters(), 0.1);
  const Counts before = counts();
  for (int i = 0; i < 3; ++i) {
    const at::Tensor x = input_of(i, at::kCPU);
    here.zero_grad();
    alone->forward(x).pow(2).sum().backward();
    here.step();
    there.zero_grad();
    const at::Tensor output = replicas.forward(x.to(device()));
    EXPECT_EQ(output.device(), device());
    output.pow(2).sum().backward();
    there.step();
  }
  EXPECT_EQ(counts().reads, before.reads);
  for (std::size_t i = 0; i < alone->parameters().size(); ++i)
    EXPECT_TRUE(near(model->parameters()[i].detach().cpu(), alone->parameters()[i].detach(),
                     reduction_tolerance(at::kFloat, 64)));
}

TEST_F(AcceleratorParallel, ReplicasRunInTheCallersRegion) {
  auto model = toy_net(device());
  parallel::DataParallel replicas(model);
  const at::Tensor x = input_of(0, device());
  at::Tensor output;
  {
    const amp::Autocast region(kType, at::kHalf);
    output = replicas.forward(x);
  }
  EXPECT_EQ(output.scalar_type(), at::kHalf);
  output.to(at::kFloat).pow(2).sum().backward();
  EXPECT_EQ(model->parameters()[0].grad().scalar_type(), at::kFloat);
}

// The batch comes from the CPU, as in a program that leaves the copies to DataParallel.
TEST_F(AcceleratorParallel, BatchesOfTheCPUAreMoved) {
  auto alone = toy_net(at::kCPU), model = toy_net(device());
  parallel::DataParallel replicas(model);
  const at::Tensor x = input_of(0, at::kCPU);
  EXPECT_TRUE(near(replicas.forward(x).detach().cpu(), alone->forward(x).detach(),
                   reduction_tolerance(at::kFloat, 64)));
}

TEST_F(AcceleratorParallel, ReplicasFollowTheCallersStreams) {
  auto alone = toy_net(at::kCPU), model = toy_net(device());
  parallel::DataParallel replicas(model);
  synchronize();
  const at::Tensor x = input_of(0, at::kCPU);
  const c10::StreamGuard guard(
      c10::impl::VirtualGuardImpl(kType).getStreamFromGlobalPool(device(), false));
  const at::Tensor output = replicas.forward(x.to(device()));
  EXPECT_TRUE(
      near(output.detach().cpu(), alone->forward(x).detach(), reduction_tolerance(at::kFloat, 64)));
  synchronize();
}

TEST_F(AcceleratorParallel, OneRankTrainsWithDistributedDataParallel) {
  auto alone = toy_net(at::kCPU), model = toy_net(device());
  parallel::DistributedDataParallel ddp(model, comm::Group());
  torch::optim::SGD here(alone->parameters(), 0.1), there(model->parameters(), 0.1);
  for (int i = 0; i < 3; ++i) {
    const at::Tensor x = input_of(i, at::kCPU);
    here.zero_grad();
    alone->forward(x).pow(2).sum().backward();
    here.step();
    there.zero_grad();
    ddp.forward(x.to(device())).pow(2).sum().backward();
    there.step();
  }
  for (std::size_t i = 0; i < alone->parameters().size(); ++i)
    EXPECT_TRUE(near(model->parameters()[i].detach().cpu(), alone->parameters()[i].detach(),
                     reduction_tolerance(at::kFloat, 64)));
}

TEST_F(AcceleratorParallel, OneRankTrainsWithZeRO) {
  auto alone = toy_net(at::kCPU), model = toy_net(device());
  const auto make = [](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::make_unique<optim::FusedAdam>(groups, optim::FusedAdamOptions(0.01));
  };
  parallel::ZeroRedundancyOptimizer here(alone->parameters(), make, comm::Group());
  parallel::ZeroRedundancyOptimizer there(model->parameters(), make, comm::Group());
  for (int i = 0; i < 3; ++i) {
    const at::Tensor x = input_of(i, at::kCPU);
    here.zero_grad();
    alone->forward(x).pow(2).sum().backward();
    here.step();
    there.zero_grad();
    model->forward(x.to(device())).pow(2).sum().backward();
    there.step();
  }
  for (std::size_t i = 0; i < alone->parameters().size(); ++i)
    EXPECT_TRUE(near(model->parameters()[i].detach().cpu(), alone->parameters()[i].detach(),
                     reduction_tolerance(at::kFloat, 64)));
}

}  // namespace
}  // namespace semitone::test::accelerator
