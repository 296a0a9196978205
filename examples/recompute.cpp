// Saves memory at the cost of computation: the backward pass recomputes activations (activation
// checkpointing), and the loss of a large vocabulary does not keep its logits.
#include <semitone/amp.h>
#include <semitone/nn.h>
#include <semitone/recompute/checkpoint.h>
#include <semitone/recompute/linear_cross_entropy.h>

#include <torch/torch.h>

#include <cmath>
#include <iostream>

namespace amp = semitone::amp;
namespace nn = semitone::nn;

struct LanguageModelImpl : torch::nn::Module {
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(256, 32));
  torch::nn::Sequential block = register_module(
      "block", torch::nn::Sequential(torch::nn::Linear(32, 128), torch::nn::GELU(),
                                     torch::nn::Dropout(0.1), torch::nn::Linear(128, 32)));
  torch::nn::Linear head =
      register_module("head", torch::nn::Linear(torch::nn::LinearOptions(32, 256).bias(false)));

  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& targets, bool recompute) {
    const auto x = embedding(tokens);
    if (!recompute) return torch::cross_entropy_loss(head(x + block->forward(x)), targets);
    const auto hidden = x + nn::checkpoint(block, x);  // keeps x only
    return nn::linear_cross_entropy(hidden, head->weight, targets);
  }
};
TORCH_MODULE(LanguageModel);

namespace {

double train(bool recompute) {
  torch::manual_seed(0);
  LanguageModel model;
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  auto mixed =
      amp::initialize(model, optimizer, amp::Options("O1").dtype(torch::kBFloat16).verbosity(0));
  const auto tokens = torch::randint(256, {256});
  const auto targets = (tokens + 1) % 256;
  double last = 0;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    const auto loss = mixed.forward(model, tokens, targets, recompute);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
    last = loss.item<double>();
  }
  return last;
}

}  // namespace

int main() try {
  const double kept = train(false);
  const double computed_again = train(true);  // with the same random numbers in dropout
  std::cout << "loss " << kept << " with activations that are kept, " << computed_again
            << " with those computed again\n";
  return kept < 2 && std::abs(kept - computed_again) < 0.1 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
