// A gradient penalty: the loss grows with the norm of its own gradient, here that of the images, so
// that the model depends less on single pixels. This gradient comes from the scaled loss, and the
// program divides it by the scale itself. In PyTorch: python/gradient_penalty.py.
//
//   gradient_penalty [DATA_DIR]
#include <semitone/semitone.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;
namespace zoo = semitone::zoo;

namespace {

struct Result {
  double loss = 0;  // without the penalty
  double norm = 0;  // of an image's gradient
};

// Trains a model, and returns the mean of the last 20 steps.
Result train(const zoo::ImageSet& data, double weight_of_penalty) {
  const auto device = semitone::default_device();
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Flatten(), torch::nn::Linear(784, 64), torch::nn::Tanh(),
                              torch::nn::Linear(64, 10));
  model->to(device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  amp::GradScaler scaler;

  const int64_t batch = 100;
  const int64_t steps = 120;
  Result result;
  for (int64_t step = 0; step < steps; ++step) {
    const auto images = data.images.narrow(0, step * batch, batch)
                            .to(device, torch::kFloat)
                            .div_(255)
                            .requires_grad_();
    const auto labels = data.labels.narrow(0, step * batch, batch).to(device);
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const amp::Autocast region(device, torch::kHalf);
      loss = torch::cross_entropy_loss(model->forward(images), labels);
    }
    // A result with a graph of its own, in the .grad() of no parameter: unscale_ does not see it.
    const auto scaled = torch::autograd::grad({scaler.scale(loss)}, {images}, /*grad_outputs=*/{},
                                              /*retain_graph=*/true, /*create_graph=*/true);
    const auto gradient = scaled[0] * (1 / scaler.get_scale());
    torch::Tensor norm;
    torch::Tensor total;
    {
      const amp::Autocast region(device, torch::kHalf);
      norm = (gradient * batch).flatten(1).norm(2, 1).mean();  // the loss is a mean of the batch
      total = loss + weight_of_penalty * norm;
    }
    scaler.scale(total).backward();  // goes through the first backward pass, too
    scaler.step(optimizer);          // skips if either pass overflowed
    scaler.update();
    if (step >= steps - 20) {
      result.loss += loss.item<double>() / 20;
      result.norm += norm.item<double>() / 20;
    }
  }
  std::cout << "weight " << weight_of_penalty << ": loss " << result.loss << ", norm "
            << result.norm << ", skipped " << scaler.scaler().skipped_steps() << '\n';
  return result;
}

}  // namespace

int main(int argc, char** argv) try {
  const auto data = zoo::load_mnist(argc > 1 ? argv[1] : "data/mnist", zoo::Split::train);
  const auto plain = train(data, 0);
  const auto penalised = train(data, 1);
  return penalised.loss < 0.6 && penalised.norm < 0.85 * plain.norm ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
