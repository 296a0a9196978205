// Two models, two optimizers, and three losses with a loss scale each: the structure of DCGAN in
// Apex's example. The generator learns to imitate a normal distribution with mean 4 and deviation
// 1.25.
#include <semitone/amp.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;

namespace {

torch::nn::Sequential mlp(int64_t in, int64_t out) {
  return torch::nn::Sequential(torch::nn::Linear(in, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, out));
}

}  // namespace

int main() try {
  torch::manual_seed(0);
  auto generator = mlp(8, 1);
  auto discriminator = mlp(1, 1);
  torch::optim::Adam optimizer_g(generator->parameters(),
                                 torch::optim::AdamOptions(1e-3).betas({0.5, 0.999}));
  torch::optim::Adam optimizer_d(discriminator->parameters(),
                                 torch::optim::AdamOptions(1e-3).betas({0.5, 0.999}));
  auto mixed = amp::initialize(
      {generator, discriminator}, {optimizer_g, optimizer_d},
      amp::Options(amp::OptLevel::O1).dtype(torch::kHalf).num_losses(3).verbosity(0));

  const auto judge = [&](const torch::Tensor& samples, double label) {
    const auto logits = mixed.forward(discriminator, samples);
    return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, label));
  };
  const auto sample = [&] { return mixed.forward(generator, torch::randn({256, 8})); };
  for (int step = 0; step < 1500; ++step) {
    optimizer_d.zero_grad();
    mixed
        .scale_loss(judge(torch::randn({256, 1}) * 1.25 + 4, 1), optimizer_d,
                    amp::ScaleLossOptions().loss_id(0))
        .backward();
    mixed.scale_loss(judge(sample().detach(), 0), optimizer_d, amp::ScaleLossOptions().loss_id(1))
        .backward();
    mixed.step(optimizer_d);

    optimizer_g.zero_grad();
    optimizer_d.zero_grad();
    mixed.scale_loss(judge(sample(), 1), optimizer_g, amp::ScaleLossOptions().loss_id(2))
        .backward();
    mixed.step(optimizer_g);
  }
  torch::NoGradGuard no_grad;
  const auto samples = mixed.forward(generator, torch::randn({10000, 8}));
  const double mean = samples.mean().item<double>();
  std::cout << "mean " << mean << " (4), deviation " << samples.std().item<double>()
            << " (1.25); scales " << mixed.loss_scaler(0).scale() << ", "
            << mixed.loss_scaler(1).scale() << ", " << mixed.loss_scaler(2).scale() << ", skipped "
            << mixed.skipped_steps() << '\n';
  return std::abs(mean - 4) < 0.5 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
