// The options of DistributedDataParallel, and its other functions: for layers that a step does not
// use, accumulated batches, and ranks with different numbers of batches.
#include <semitone/launch/spawn.h>
#include <semitone/semitone.h>

#include <torch/torch.h>

#include <iostream>
#include <string>

namespace comm = semitone::comm;
namespace parallel = semitone::parallel;

struct NetImpl : torch::nn::Module {
  torch::nn::Linear body = register_module("body", torch::nn::Linear(16, 8));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(8));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(8, 1));
  torch::nn::Linear other_head = register_module("other_head", torch::nn::Linear(8, 1));

  torch::Tensor forward(const torch::Tensor& x, bool other = false) {
    const auto features = torch::relu(norm(body(x)));
    return other ? other_head(features) : head(features);
  }
};
TORCH_MODULE(Net);

namespace {

void require(bool right, const std::string& what) {
  if (!right) throw semitone::Error("ddp_options", what, "something else");
}

// Trains with these options: a step, two accumulated batches, and uneven batches.
void train(const std::string& name, const comm::Group& group,
           const parallel::DistributedDataParallelOptions& options) {
  torch::manual_seed(group.rank() == 0 ? 0 : 1);  // other weights: all ranks get those of rank 0
  Net model;
  model->to(group.device());
  parallel::DistributedDataParallel ddp(model, group, options);
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  const auto backward = [&] {
    const auto x = torch::randn({8, 16}, group.device());
    torch::mse_loss(ddp.forward(x), x.narrow(1, 0, 1)).backward();
  };

  optimizer.zero_grad();
  {
    const auto local = ddp.no_sync();  // the gradients of this pass stay on the rank
    backward();
  }
  backward();  // and this one averages the sums
  optimizer.step();

  // Rank 0 has two more batches. Meanwhile the other ranks contribute zeros.
  const int batches = group.rank() == 0 ? 4 : 2;
  if (!options.static_graph()) {
    ddp.join(
        [&] {
          for (int batch = 0; batch < batches; ++batch) {
            optimizer.zero_grad();
            backward();
            optimizer.step();
          }
        },
        parallel::JoinOptions().divide_by_initial_world_size(true).throw_on_early_termination(
            false));
  }
  // ddp-> and *ddp are the model.
  const auto weights = group.all_gather(ddp->head->weight.detach());
  require(weights.front().equal(weights.back()), "the same weights on all ranks: " + name);
  if (group.rank() == 0)
    std::cout << name << ": weight " << weights[0].norm().item<double>() << '\n';
}

void run() {
  const comm::Group group = comm::init();
  using Options = parallel::DistributedDataParallelOptions;
  const Options unused = Options().find_unused_parameters(true);  // here: the other head
  train("unused parameters", group, unused);
  train("buckets", group, Options(unused).bucket_cap_mb(10).first_bucket_mb(0.5));
  train("gradients in the buckets", group, Options(unused).gradient_as_bucket_view(true));
  train("each rank keeps its buffers", group, Options(unused).broadcast_buffers(false));
  train("one graph for all steps", group, Options().static_graph(true));
  train("all gradients at the end", group, Options().delay_allreduce(true));
  train("sums in fp32, divided before and after", group,
        Options(unused).allreduce_always_fp32(true).gradient_predivide_factor(1));
  train("gradients are sent in 16 bits", group, Options(unused).compress(torch::kBFloat16));
}

}  // namespace

int main() try {
  return semitone::launch::spawn([](int) { run(); }, 2).exit_code();
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
