// Saves a model at O2 in files of LibTorch: its weights in fp32, although it computes in 16 bits,
// and the state of its training. python_weights.cpp writes files for Python, and
// checkpoint_resume.cpp saves a whole run.
#include <semitone/amp.h>

#include <torch/torch.h>

#include <filesystem>
#include <iostream>
#include <random>
#include <string>

namespace amp = semitone::amp;

int main() try {
  const std::string file = std::filesystem::temp_directory_path() /
                           ("model-" + std::to_string(std::random_device{}()) + ".pt");
  torch::manual_seed(0);
  torch::nn::Linear model(16, 4);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = amp::initialize(model, optimizer, amp::Options("O2").verbosity(0));
  const auto x = torch::randn({64, 16});
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    mixed.scale_loss(mixed.forward(model, x).square().mean(), optimizer).backward();
    mixed.step(optimizer);
  }

  mixed.save_model(model, file);
  torch::nn::Linear by_name(16, 4);  // of a program without mixed precision
  torch::load(by_name, file);

  torch::nn::Linear in_scope(16, 4);
  {
    const auto fp32 = mixed.fp32_weights(model);  // until the end of the scope
    torch::save(model, file);
  }
  torch::load(in_scope, file);

  mixed.load_model(model, file);  // loads both the model and the masters

  // What a resumed training needs besides: loss scales and masters, bit for bit.
  torch::serialize::OutputArchive state;
  mixed.save(state);
  state.save_to(file);
  torch::serialize::InputArchive saved;
  saved.load_from(file);
  mixed.load(saved);
  std::filesystem::remove(file);
  const auto master = mixed.master_params(optimizer)[0];
  std::cout << "model " << model->weight.dtype() << ", file " << by_name->weight.dtype() << '\n';
  return by_name->weight.equal(in_scope->weight) && by_name->weight.equal(master) ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
