// A model whose forward returns a struct of tensors, trained at O2: it classifies digits, and draws
// them again from a code of 32 numbers. In PyTorch: python/struct_result.py.
//
//   struct_result [DATA_DIR]
#include <semitone/amp.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>
#include <optional>

namespace amp = semitone::amp;
namespace zoo = semitone::zoo;

// forward of the wrapper finds the tensors of a struct by itself. A class with private fields needs
// a method map_tensors: docs/opt_levels.md.
struct Output {
  torch::Tensor logits;
  torch::Tensor code;
  std::optional<torch::Tensor> drawing;  // in training only
};

struct NetImpl : torch::nn::Module {
  torch::nn::Sequential encoder = register_module(
      "encoder",
      torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 5).stride(2)),
                            torch::nn::BatchNorm2d(8), torch::nn::ReLU(),
                            torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 16, 5).stride(2)),
                            torch::nn::BatchNorm2d(16), torch::nn::ReLU(), torch::nn::Flatten(),
                            torch::nn::Linear(16 * 4 * 4, 32)));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(32, 10));
  torch::nn::Linear decoder = register_module("decoder", torch::nn::Linear(32, 28 * 28));

  Output forward(const torch::Tensor& images) {
    Output output;
    output.code = encoder->forward(images);
    output.logits = head(torch::relu(output.code));
    if (is_training()) output.drawing = decoder(output.code).sigmoid().view_as(images);
    return output;
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
  const Output output = mixed.forward(model, images_of(data, 0, count));
  model->train();
  const auto right = output.logits.argmax(1).eq(data.labels.narrow(0, 0, count));
  return right.to(torch::kFloat).mean().item<double>();
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string data_dir = argc > 1 ? argv[1] : "data/mnist";
  const auto data = zoo::load_mnist(data_dir, zoo::Split::train);
  const auto test = zoo::load_mnist(data_dir, zoo::Split::test);
  torch::manual_seed(0);
  Net model;
  torch::optim::Adam optimizer(model->parameters(), 2e-3);
  auto mixed = amp::initialize(model, optimizer, amp::Options("O2"));

  const int64_t batch = 100;
  for (int64_t step = 0; step < 200; ++step) {
    const auto images = images_of(data, step * batch, batch);
    // The model computes them in 16 bits. In the result they are fp32.
    const Output output = mixed.forward(model, images);
    const auto classes =
        torch::cross_entropy_loss(output.logits, data.labels.narrow(0, step * batch, batch));
    const auto drawing = torch::mse_loss(output.drawing.value(), images);
    optimizer.zero_grad();
    mixed.scale_loss(classes + drawing, optimizer).backward();
    mixed.step(optimizer);
    if (step % 50 == 0) {
      std::cout << "step " << step << ": loss " << classes.item<double>() << " of the classes, "
                << drawing.item<double>() << " of the drawing (" << output.code.dtype() << ")\n";
    }
  }
  const double correct = accuracy(mixed, model, test);
  std::cout << "accuracy " << correct << ", skipped " << mixed.skipped_steps() << '\n';
  return correct > 0.9 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
