// Mixed precision as in Paddle's documentation: the convolutional MNIST program, with Paddle's op
// lists and loss scaling, in channels last (Paddle's NHWC). In Paddle: python/paddle_mnist.py.
//
//   paddle_mnist [DATA_DIR]
#include <semitone/amp.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;
namespace zoo = semitone::zoo;

struct NetImpl : torch::nn::Module {
  torch::nn::Sequential features = register_module(
      "features", torch::nn::Sequential(
                      torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 5).padding(2)),
                      torch::nn::BatchNorm2d(16), torch::nn::ReLU(), torch::nn::MaxPool2d(2),
                      torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 64, 5).padding(2)),
                      torch::nn::BatchNorm2d(64), torch::nn::ReLU(), torch::nn::MaxPool2d(2)));
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(7 * 7 * 64, 64));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(64, 10));

  torch::Tensor forward(const torch::Tensor& images) {
    return head(torch::relu(hidden(features->forward(images).flatten(1))));
  }
};
TORCH_MODULE(Net);

namespace {

torch::Tensor images_of(const zoo::ImageSet& data, int64_t first, int64_t count) {
  return data.images.narrow(0, first, count).unsqueeze(1).to(torch::kFloat).div_(255);
}

double accuracy(amp::MixedPrecision& mixed, Net& model, const zoo::ImageSet& data) {
  const torch::NoGradGuard no_grad;
  model->eval();
  const int64_t count = 1000;
  const auto predicted = mixed.forward(model, images_of(data, 0, count)).argmax(1);
  model->train();
  return predicted.eq(data.labels.narrow(0, 0, count)).to(torch::kFloat).mean().item<double>();
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string data_dir = argc > 1 ? argv[1] : "data/mnist";
  const auto data = zoo::load_mnist(data_dir, zoo::Split::train);
  const auto test = zoo::load_mnist(data_dir, zoo::Split::test);
  torch::manual_seed(0);
  Net model;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  auto mixed =
      amp::initialize(model, optimizer,
                      amp::Options(amp::OptLevel::O1)
                          .dtype(torch::kHalf)
                          .policy(amp::CastPolicy::paddle(torch::kHalf))
                          .memory_format(torch::MemoryFormat::ChannelsLast)
                          .loss_scale_options(amp::LossScaleOptions::paddle()
                                                  .init_scale(256)       // init_loss_scaling=2**8
                                                  .growth_interval(500)  // incr_every_n_steps
                                                  .hysteresis(4)         // decr_every_n_nan_or_inf
                                                  .growth_factor(2)      // incr_ratio
                                                  .backoff_factor(0.5)));  // decr_ratio

  const int64_t batch = 50;
  for (int64_t step = 0; step < 200; ++step) {
    const auto images = images_of(data, step * batch, batch);
    const auto labels = data.labels.narrow(0, step * batch, batch);
    const auto loss = torch::cross_entropy_loss(mixed.forward(model, images), labels);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
    mixed.zero_grad(optimizer);
    if (step % 50 == 0) std::cout << "step " << step << ": loss " << loss.item<double>() << '\n';
  }
  const double correct = accuracy(mixed, model, test);
  std::cout << "accuracy " << correct << ", loss scale " << mixed.loss_scaler().scale()
            << ", skipped " << mixed.skipped_steps() << '\n';
  return correct > 0.88 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
