// Other ways to average gradients or weights over processes: hooks that send less, a hook of your
// own, and ranks that train on their own for some steps.
#include <semitone/launch/spawn.h>
#include <semitone/semitone.h>

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace comm = semitone::comm;
namespace parallel = semitone::parallel;

namespace {

torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::ReLU(),
                               torch::nn::Linear(64, 64));
}

using Options = parallel::DistributedDataParallelOptions;
using Parameters = std::vector<torch::Tensor>;

// Trains a model on each rank's own data. Prints the first and the last loss of rank 0.
void train(const std::string& name, const comm::Group& group,
           const std::function<Options(const Parameters&)>& options_for,
           const std::function<void(const Parameters&)>& after_step = {}) {
  auto model = make_model();
  parallel::DistributedDataParallel ddp(model, group, options_for(model->parameters()));
  torch::optim::SGD optimizer(model->parameters(), 0.02);
  const auto target = torch::randn({64, 64});
  torch::manual_seed(static_cast<std::uint64_t>(group.rank()) + 1);
  double first = 0;
  double last = 0;
  for (int step = 0; step < 60; ++step) {
    const auto x = torch::randn({32, 64});
    optimizer.zero_grad();
    const auto loss = (ddp.forward(x) - x.mm(target) / 8).square().sum(1).mean();
    loss.backward();
    optimizer.step();
    if (after_step) after_step(model->parameters());
    (step == 0 ? first : last) = loss.item<double>();
  }
  if (group.rank() == 0) std::cout << name << ": loss " << first << " -> " << last << '\n';
  if (!(last < 0.75 * first))
    throw semitone::Error("comm_hooks", "a lower loss with " + name, "none");
}

// A hook of your own gets the bucket and the group. This one sends the mean in float64.
class InFloat64 final : public parallel::CommHook {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> reduce(const parallel::GradientBucket& bucket,
                                                 const comm::Group& group) override {
    auto wide = bucket.buffer.to(torch::kDouble);
    group.all_reduce(wide, comm::ReduceOp::mean);
    auto done = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    done->markCompleted(wide.to(bucket.buffer.scalar_type()));
    return done;
  }
};

void run() {
  const comm::Group group = comm::init();
  const auto with = [](std::shared_ptr<parallel::CommHook> hook) {
    return Options().comm_hook(std::move(hook));
  };
  train("all gradients", group, [](const Parameters&) { return Options(); });
  train("float16", group, [](const Parameters&) { return Options().compress(torch::kHalf); });
  train("low rank", group, [&](const Parameters& parameters) {
    return with(std::make_shared<parallel::PowerSGDHook>(
        parameters,
        parallel::PowerSGDOptions().matrix_approximation_rank(4).start_powerSGD_iter(2)));
  });
  train("8 bits", group, [&](const Parameters& parameters) {
    return with(std::make_shared<parallel::QuantizedAllReduceHook>(parameters));
  });
  train("a hook of your own", group,
        [&](const Parameters&) { return with(std::make_shared<InFloat64>()); });

  // After 10 steps, gradients are averaged over a part of the ranks only, and weights over all
  // ranks in every 4th step.
  const auto part = group.split(1);
  parallel::PeriodicModelAverager averager(group, /*period=*/4, /*warmup_steps=*/10);
  train(
      "weights of all ranks, now and then", group,
      [&](const Parameters&) {
        return with(std::make_shared<parallel::PostLocalSGDHook>(
            part, parallel::PostLocalSGDOptions().start_localSGD_iter(10)));
      },
      [&](const Parameters& parameters) { averager.average_parameters(parameters); });

  // A hierarchy: weights are averaged over small parts often, and over larger parts less often.
  parallel::PeriodicModelAverager near(group.split(1), 2);
  parallel::PeriodicModelAverager far(group.split(2), 8);
  train(
      "weights of larger and larger parts", group,
      [&](const Parameters&) { return with(std::make_shared<parallel::PostLocalSGDHook>(part)); },
      [&](const Parameters& parameters) {
        near.average_parameters(parameters);
        far.average_parameters(parameters);
      });
}

}  // namespace

int main() try {
  return semitone::launch::spawn([](int) { run(); }, 2).exit_code();
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
