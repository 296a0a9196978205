// Fine-tunes a TorchScript model with frozen BatchNorm layers, as programs do with a pretrained
// network from Python's torch.jit.save. In PyTorch: python/torchscript_finetune.py.
//
//   torchscript_finetune [DATA_DIR]
//
// The archive comes from C++ here: a small residual network that has learned the digits 0 to 4.
// Fine-tuning teaches it the others.
#include <semitone/amp.h>
#include <semitone/zoo/mnist.h>

#include <torch/script.h>
#include <torch/torch.h>

#include <filesystem>
#include <iostream>
#include <random>
#include <string>

namespace amp = semitone::amp;
namespace zoo = semitone::zoo;

namespace {

torch::jit::Module convolution(int64_t in, int64_t out) {
  torch::jit::Module layer("Convolution");
  layer.register_parameter("weight",
                           torch::nn::init::kaiming_normal_(torch::empty({out, in, 3, 3})), false);
  layer.define(R"(
    def forward(self, x):
        return torch.conv2d(x, self.weight, None, [1, 1], [1, 1])
  )");
  return layer;
}

torch::jit::Module batch_norm(int64_t channels) {
  torch::jit::Module layer("BatchNorm");
  layer.register_parameter("weight", torch::ones({channels}), false);
  layer.register_parameter("bias", torch::zeros({channels}), false);
  layer.register_buffer("running_mean", torch::zeros({channels}));
  layer.register_buffer("running_var", torch::ones({channels}));
  layer.register_attribute("training", c10::BoolType::get(), true);
  layer.define(R"(
    def forward(self, x):
        return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var,
                                self.training, 0.1, 1e-5, False)
  )");
  return layer;
}

torch::jit::Module network() {
  torch::jit::Module net("Network");
  net.register_module("conv1", convolution(1, 16));
  net.register_module("bn1", batch_norm(16));
  net.register_module("conv2", convolution(16, 16));
  net.register_module("bn2", batch_norm(16));
  net.register_parameter("head", torch::randn({10, 16 * 7 * 7}) * 0.01, false);
  net.define(R"(
    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.bn1.forward(self.conv1.forward(x))), [2, 2])
        x = torch.relu(x + self.bn2.forward(self.conv2.forward(x)))
        return torch.linear(torch.flatten(torch.max_pool2d(x, [2, 2]), 1), self.head)
  )");
  for (at::Tensor parameter : net.parameters()) parameter.set_requires_grad(true);
  return net;
}

torch::Tensor images_of(const zoo::ImageSet& data) {
  return data.images.unsqueeze(1).to(torch::kFloat).div_(255);
}

double accuracy(torch::jit::Module& model, const zoo::ImageSet& data) {
  const torch::NoGradGuard no_grad;
  const auto predicted = model.forward({images_of(data)}).toTensor().argmax(1);
  return predicted.eq(data.labels).to(torch::kFloat).mean().item<double>();
}

// Trains the parameters that require a gradient, in two passes over the images.
void train(torch::jit::Module& model, const zoo::ImageSet& data) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : model.parameters())
    if (parameter.requires_grad()) parameters.push_back(parameter);
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.02).momentum(0.9));
  auto mixed = amp::initialize(model, optimizer, amp::Options("O1").verbosity(0));
  const int64_t batch = 50;
  for (int64_t i = 0; i < 2 * (data.size() / batch); ++i) {
    const int64_t first = i * batch % (data.size() / batch * batch);
    const zoo::ImageSet rows{data.images.narrow(0, first, batch),
                             data.labels.narrow(0, first, batch)};
    const auto output = mixed.forward(model, images_of(rows)).toTensor();
    mixed.scale_loss(torch::cross_entropy_loss(output, rows.labels), optimizer).backward();
    mixed.step(optimizer);
    mixed.zero_grad(optimizer);
  }
}

// The layers keep the statistics and the weights of the pretrained model. Call it again after
// model.train().
void freeze_batch_norm(torch::jit::Module& model) {
  for (torch::jit::Module layer : model.modules()) {
    if (!layer.hasattr("running_mean")) continue;
    layer.eval();
    for (at::Tensor parameter : layer.parameters(/*recurse=*/false))
      parameter.set_requires_grad(false);
  }
}

zoo::ImageSet first_of(const zoo::ImageSet& data, int64_t count) {
  return {data.images.narrow(0, 0, count), data.labels.narrow(0, 0, count)};
}

zoo::ImageSet digits_below_5(const zoo::ImageSet& data) {
  const auto chosen = data.labels.lt(5);
  return {data.images.index({chosen}), data.labels.index({chosen})};
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string data_dir = argc > 1 ? argv[1] : "data/mnist";
  const auto data = first_of(zoo::load_mnist(data_dir, zoo::Split::train), 5000);
  const auto test = first_of(zoo::load_mnist(data_dir, zoo::Split::test), 1000);
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() /
      ("pretrained-" + std::to_string(std::random_device{}()) + ".pt");
  torch::manual_seed(0);
  {
    auto pretrained = network();
    train(pretrained, digits_below_5(data));
    pretrained.save(file.string());
  }

  auto model = torch::jit::load(file.string());
  std::filesystem::remove(file);
  freeze_batch_norm(model);
  std::vector<at::Tensor> statistics;
  for (const at::Tensor& buffer : model.buffers()) statistics.push_back(buffer.clone());
  const double before = accuracy(model, test);
  train(model, data);
  const double after = accuracy(model, test);
  bool unchanged = !statistics.empty();
  std::size_t i = 0;
  for (const at::Tensor& buffer : model.buffers())
    unchanged = unchanged && torch::equal(buffer, statistics.at(i++));
  std::cout << "accuracy " << before << " -> " << after << ", statistics of BatchNorm "
            << (unchanged ? "unchanged" : "changed") << '\n';
  return before < 0.6 && after > 0.8 && unchanged ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
