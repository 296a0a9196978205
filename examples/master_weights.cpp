// fp32 master weights without an opt level: the program casts the model and writes the steps, as
// with Apex's fp16_utils. amp::initialize does all of this at O2.
#include <semitone/amp.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;

int main() try {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(),
                              torch::nn::Linear(32, 4));
  model->to(torch::kBFloat16);
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  amp::MasterWeights masters(optimizer);  // the optimizer now has fp32 copies of the parameters
  amp::LossScaler scaler(amp::LossScaleOptions().init_scale(1024));

  const auto x = torch::randn({64, 16}, torch::kBFloat16);
  const auto y = torch::randn({64, 4});
  double first = 0;
  double last = 0;
  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model->forward(x).to(torch::kFloat), y);
    scaler.scaled(loss).backward();
    const bool overflowed = masters.take_gradients(scaler.inverse());  // fp32, unscaled
    if (!overflowed) {
      torch::nn::utils::clip_grad_norm_(optimizer.param_groups()[0].params(), 1.0);
      optimizer.step();
      masters.write_model();  // rounds them and copies them to the model
    }
    scaler.update(overflowed);
    (step == 0 ? first : last) = loss.item<double>();
  }

  const auto weight = model->parameters()[0];
  const auto master = masters.master_of(weight);
  std::cout << masters.size() << " masters in " << master.dtype() << ", loss " << first << " -> "
            << last << ", skipped " << scaler.skipped_steps() << '\n';
  return last < first / 2 && master.to(torch::kBFloat16).equal(weight) &&
                 !master.equal(weight.to(torch::kFloat))
             ? 0
             : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
