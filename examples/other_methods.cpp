// A model at an opt level that is called in other ways than by its forward: by another method, by
// one of its layers, or in code of the program that computes with it.
#include <semitone/amp.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;

struct AutoencoderImpl : torch::nn::Module {
  torch::nn::Linear encoder = register_module("encoder", torch::nn::Linear(32, 4));
  torch::nn::Linear decoder = register_module("decoder", torch::nn::Linear(4, 32));

  torch::Tensor encode(const torch::Tensor& x) { return torch::tanh(encoder(x)); }
  torch::Tensor decode(const torch::Tensor& z) { return decoder(z); }
  torch::Tensor forward(const torch::Tensor& x) { return decode(encode(x)); }
};
TORCH_MODULE(Autoencoder);

int main() try {
  torch::manual_seed(0);
  Autoencoder model;
  torch::optim::Adam optimizer(model->parameters(), 1e-2);
  auto mixed =
      amp::initialize(model, optimizer, amp::Options("O1").dtype(torch::kBFloat16).verbosity(0));
  const auto x = torch::randn({64, 4}).mm(torch::randn({4, 32}));
  double first = 0;
  double last = 0;
  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    const auto z = mixed.call([&](const auto& images) { return model->encode(images); }, x);
    const auto loss =
        torch::mse_loss(mixed.call([&](const auto& codes) { return model->decode(codes); }, z), x);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
    (step == 0 ? first : last) = loss.item<double>();
  }

  const torch::NoGradGuard no_grad;
  const auto z = torch::randn({8, 4});
  const auto by_call = mixed.call([&](const auto& codes) { return model->decode(codes); }, z);
  const auto by_layer = mixed.forward(model->decoder, z);
  torch::Tensor in_region;
  torch::Tensor in_fp32;
  {
    const auto region = mixed.autocast();  // casts arguments of operators, and no results
    in_region = model->decode(z);
    const amp::DisableCasts no_casts;  // until the end of the scope
    in_fp32 = model->decode(z);
  }
  std::cout << "loss " << first << " -> " << last << "; decode: " << by_call.dtype()
            << " from call, " << by_layer.dtype() << " from the layer's forward, "
            << in_region.dtype() << " in the region, " << in_fp32.dtype() << " without casts\n";
  const bool same = by_call.equal(by_layer) && by_call.equal(in_region.to(torch::kFloat));
  const bool right = same && in_region.scalar_type() == torch::kBFloat16 &&
                     in_fp32.scalar_type() == torch::kFloat && !in_fp32.equal(by_call);
  return right && last < first / 2 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
