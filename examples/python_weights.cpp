// Weights to and from Python: trains at O2, writes the fp32 weights as safetensors, and reads them
// into another model. In Python:
//
//   model.load_state_dict(safetensors.torch.load_file("weights.safetensors"))
//
//   python_weights [FILE]   the file to write and to keep; NAME.pt is for Python's torch.load
#include <semitone/semitone.h>

#include <torch/torch.h>

#include <filesystem>
#include <iostream>
#include <random>
#include <string>

namespace amp = semitone::amp;
namespace weights = semitone::weights;

namespace {

torch::nn::Sequential make_model() {
  return torch::nn::Sequential(torch::nn::Linear(16, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, 4));
}

}  // namespace

int main(int argc, char** argv) try {
  const bool keep = argc > 1;
  const std::filesystem::path temporary = std::filesystem::temp_directory_path() /
                                          ("weights-" + std::to_string(std::random_device{}()));
  const std::filesystem::path file = keep ? argv[1] : temporary.string() + ".safetensors";

  torch::manual_seed(0);
  auto model = make_model();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = amp::initialize(model, optimizer, amp::Options("O2"));
  const auto x = torch::randn({64, 16});
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    const auto loss = mixed.forward(model, x).square().mean();
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
  }
  weights::save(model, file);  // the fp32 masters, although the model computes in 16 bits

  auto other = make_model();  // fp32
  weights::load(other, file);
  const double apart = (other->forward(x) - mixed.forward(model, x)).abs().max().item<double>();
  std::cout << weights::read(file).tensors.size() << " tensors in " << file.string()
            << ", outputs differ by " << apart << '\n';

  // In 16 bits, and with the names that a model has in Python's DistributedDataParallel.
  weights::StateDict wrapped;
  for (const auto& named : weights::read(file).tensors)
    wrapped.insert("module." + named.key(), named.value());
  const std::filesystem::path half = temporary.string() + "-half.safetensors";
  weights::write(half, wrapped, weights::SaveOptions().dtype(torch::kHalf));
  weights::load(other, half, weights::LoadOptions().strip_prefix("module."));
  const double rounded = (other->forward(x) - mixed.forward(model, x)).abs().max().item<double>();
  std::filesystem::remove(half);
  if (!keep) std::filesystem::remove(file);
  return apart < 0.02 && rounded < 0.02 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
