#include "tests/accelerator/training.h"
#include "tests/support/archive.h"
#include "tests/support/levels.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tolerance.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/optim.h>
#include <torch/serialize.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

// Files that one device writes and another reads, and training on several streams.
namespace semitone::test::accelerator {
namespace {

// A training that can be saved in the middle.
class SavableTraining {
 public:
  SavableTraining(c10::Device where, const std::string& level)
      : where_(where),
        net_(make_net(where)),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)),
        mixed_(amp::initialize(
            net_, optimizer_,
            amp::Options(level).dtype(at::kHalf).loss_scale("dynamic").verbosity(0))) {}

  at::Tensor step(int number, bool overflows = false) {
    const at::Tensor input = input_of(number, where_);
    optimizer_.zero_grad();
    at::Tensor loss = loss_of(mixed_.forward(net_, input), input);
    mixed_.scale_loss(overflows ? loss / 0 : loss, optimizer_).backward();
    mixed_.step(optimizer_);
    return loss.detach();
  }

  void save(const std::string& folder) {
    mixed_.save_model(net_, folder + "/model.pt");
    torch::save(optimizer_, folder + "/optimizer.pt");
    torch::serialize::OutputArchive archive;
    mixed_.save(archive);
    archive.save_to(folder + "/mixed.pt");
  }
  void load(const std::string& folder) {
    mixed_.load_model(net_, folder + "/model.pt");
    torch::load(optimizer_, folder + "/optimizer.pt", where_);
    torch::serialize::InputArchive archive;
    archive.load_from(folder + "/mixed.pt", where_);
    mixed_.load(archive);
  }

  std::vector<at::Tensor> masters() {
    std::vector<at::Tensor> values;
    for (const at::Tensor& master : mixed_.master_params(optimizer_))
      values.push_back(master.detach().cpu().to(at::kFloat));
    return values;
  }
  double scale() const { return mixed_.loss_scaler().scale(); }
  c10::Device device_of_masters() { return mixed_.master_params(optimizer_)[0].device(); }

 private:
  c10::Device where_;
  NormedNet net_;
  torch::optim::SGD optimizer_;
  amp::MixedPrecision mixed_;
};

struct AcceleratorCheckpoints : AcceleratorTest {};

TEST_F(AcceleratorCheckpoints, ContinueOnAnotherDevice) {
  for (const std::string level : kLevels) {
    for (const c10::Device target : {c10::Device(at::kCPU), device(0), device(1)}) {
      SCOPED_TRACE(level + " " + target.str());
      const TemporaryFolder folder;
      SavableTraining saved(device(), level), resumed(target, level);
      for (int i = 0; i < 3; ++i) saved.step(i, i == 1);
      saved.save(folder.path().string());
      resumed.step(9);
      resumed.load(folder.path().string());
      EXPECT_EQ(resumed.scale(), saved.scale());
      EXPECT_EQ(resumed.device_of_masters(), target);
      EXPECT_TRUE(same_bits(resumed.masters(), saved.masters()));
      const double want = saved.step(3).item<double>();
      EXPECT_NEAR(resumed.step(3).item<double>(), want, want * rounding_tolerance(at::kHalf, 20));
    }
  }
}

// Steps change streams as a program does it that computes beside its copies: the new stream waits
// for the old one.
TEST_F(AcceleratorCheckpoints, StepsOnChangingStreamsAreOrdered) {
  const c10::impl::VirtualGuardImpl guard(kType);
  for (const std::string level : kLevels) {
    SCOPED_TRACE(level);
    SavableTraining run(device(), level), want(at::kCPU, level);
    std::vector<at::Tensor> losses;
    c10::Stream last = guard.getStream(device());
    for (int i = 0; i < 4; ++i) {
      const c10::Stream next = guard.getStreamFromGlobalPool(device(), false);
      c10::Event event(kType);
      event.record(last);
      event.block(next);
      const c10::StreamGuard on_next(next);
      losses.push_back(run.step(i, i == 2));
      last = next;
    }
    synchronize();
    for (int i = 0; i < 4; ++i)
      EXPECT_TRUE(near(losses[static_cast<std::size_t>(i)].cpu(), want.step(i, i == 2),
                       rounding_tolerance(at::kHalf, 20)));
  }
}

}  // namespace
}  // namespace semitone::test::accelerator
