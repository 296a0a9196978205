// Finds the operator that made the first inf or NaN, and its place in the model. Here the model
// divides 0 by 0 in the seventh step.
#include <semitone/amp.h>
#include <semitone/report.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;
namespace report = semitone::report;

struct NormaliseImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return x / x.norm(2, 1, true); }
};
TORCH_MODULE(Normalise);

int main() try {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  model->push_back("features", torch::nn::Linear(torch::nn::LinearOptions(16, 8).bias(false)));
  model->push_back("normalise", Normalise());
  model->push_back("head", torch::nn::Linear(8, 2));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed =
      amp::initialize(model, optimizer, amp::Options("O1").dtype(torch::kBFloat16).verbosity(0));

  // Operators whose results are inf on purpose can be left out. every(10) would check only each
  // tenth step.
  report::NonFiniteCheck check(*model, report::NonFiniteCheckOptions().ignore({"where"}).every(1));
  for (int step = 1; step <= 10 && !check.finding().has_value(); ++step) {
    if (step > 1) check.next_step();  // clears the finding of the previous step
    const auto x = step == 7 ? torch::zeros({4, 16}) : torch::randn({4, 16});
    optimizer.zero_grad();
    const auto loss = mixed.forward(model, x).square().mean();
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
  }

  const auto finding = check.finding();
  try {
    check.throw_if_found();  // throws; ends the training unless caught
  } catch (const report::NonFiniteError& error) {
    std::cout << error.what() << '\n';
  }
  return finding.has_value() && finding->step == 7 && finding->op.starts_with("div") &&
                 finding->layer == "features"
             ? 0
             : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
