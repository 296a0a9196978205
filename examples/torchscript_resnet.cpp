// Makes the inputs of torchscript_finetune without Python: DIR/resnet18.pt, a TorchScript ResNet-18
// that has been trained on the digits 0 to 4, and DIR/images, a folder of images of the digits 5 to
// 9.
//
//   torchscript_resnet DIR [DATA_DIR]
//
// The module has the structure and the names of torch.jit.script(torchvision.models.resnet18()).
// In PyTorch: python/torchscript_resnet.py.
#include <semitone/amp.h>
#include <semitone/zoo/mnist.h>

#include <torch/script.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace amp = semitone::amp;
namespace fs = std::filesystem;
namespace zoo = semitone::zoo;
using torch::jit::Module;

namespace {

Module conv2d(int64_t in, int64_t out, int64_t size, int64_t stride) {
  Module layer("Conv2d");
  auto weight = torch::empty({out, in, size, size}, torch::requires_grad());
  torch::nn::init::kaiming_normal_(weight, 0, torch::kFanOut, torch::kReLU);
  layer.register_parameter("weight", weight, false);
  layer.register_attribute("stride", c10::IntType::get(), stride);
  layer.register_attribute("padding", c10::IntType::get(), size / 2);
  layer.define(R"(
    def forward(self, x):
        return torch.conv2d(x, self.weight, None, [self.stride, self.stride],
                            [self.padding, self.padding])
  )");
  return layer;
}

Module batch_norm2d(int64_t channels) {
  Module layer("BatchNorm2d");
  layer.register_parameter("weight", torch::ones({channels}, torch::requires_grad()), false);
  layer.register_parameter("bias", torch::zeros({channels}, torch::requires_grad()), false);
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

Module linear(int64_t in, int64_t out) {
  const torch::nn::Linear initial(in, out);
  Module layer("Linear");
  layer.register_parameter("weight", initial->weight, false);
  layer.register_parameter("bias", initial->bias, false);
  layer.define(R"(
    def forward(self, x):
        return torch.linear(x, self.weight, self.bias)
  )");
  return layer;
}

Module sequential(const Module& first, const Module& second) {
  Module layers("Sequential");
  layers.register_module("0", first);
  layers.register_module("1", second);
  layers.define(R"(
    def forward(self, x):
        return getattr(self, "1").forward(getattr(self, "0").forward(x))
  )");
  return layers;
}

Module basic_block(int64_t in, int64_t out, int64_t stride) {
  const bool changes_size = stride != 1 || in != out;
  Module block("BasicBlock");
  block.register_module("conv1", conv2d(in, out, 3, stride));
  block.register_module("bn1", batch_norm2d(out));
  block.register_module("conv2", conv2d(out, out, 3, 1));
  block.register_module("bn2", batch_norm2d(out));
  if (changes_size) {
    block.register_module("downsample", sequential(conv2d(in, out, 1, stride), batch_norm2d(out)));
  }
  block.define(std::string(R"(
    def forward(self, x):
        y = torch.relu(self.bn1.forward(self.conv1.forward(x)))
        y = self.bn2.forward(self.conv2.forward(y))
        return torch.relu(y + )") +
               (changes_size ? "self.downsample.forward(x))\n" : "x)\n"));
  return block;
}

Module resnet18(int64_t classes) {
  Module net("ResNet");
  net.register_module("conv1", conv2d(3, 64, 7, 2));
  net.register_module("bn1", batch_norm2d(64));
  int64_t in = 64;
  for (int64_t stage = 1; stage <= 4; ++stage) {
    const int64_t out = int64_t{32} << stage;
    net.register_module(
        "layer" + std::to_string(stage),
        sequential(basic_block(in, out, stage == 1 ? 1 : 2), basic_block(out, out, 1)));
    in = out;
  }
  net.register_module("fc", linear(in, classes));
  net.define(R"(
    def forward(self, x):
        x = torch.relu(self.bn1.forward(self.conv1.forward(x)))
        x = torch.max_pool2d(x, [3, 3], [2, 2], [1, 1])
        x = self.layer2.forward(self.layer1.forward(x))
        x = self.layer4.forward(self.layer3.forward(x))
        return self.fc.forward(torch.flatten(torch.adaptive_avg_pool2d(x, [1, 1]), 1))
  )");
  return net;
}

// (N, 3, 32, 32), normalised as ImageNet's images are.
torch::Tensor inputs(const torch::Tensor& images) {
  const auto mean = torch::tensor({0.485, 0.456, 0.406}, torch::kFloat).view({3, 1, 1});
  const auto deviation = torch::tensor({0.229, 0.224, 0.225}, torch::kFloat).view({3, 1, 1});
  const auto scaled = images.unsqueeze(1).to(torch::kFloat).div_(255);
  return (torch::constant_pad_nd(scaled, {2, 2, 2, 2}) - mean) / deviation;
}

// One pass over the images.
void train(Module& model, const zoo::ImageSet& set) {
  std::vector<torch::Tensor> parameters;
  for (const torch::Tensor& parameter : model.parameters()) parameters.push_back(parameter);
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.02).momentum(0.9));
  auto mixed =
      amp::initialize(model, optimizer, amp::Options("O1").choose_memory_format().verbosity(0));
  const int64_t batch = 50;
  for (int64_t first = 0; first + batch <= set.size(); first += batch) {
    optimizer.zero_grad();
    const auto output = mixed.forward(model, inputs(set.images.narrow(0, first, batch))).toTensor();
    const auto loss = torch::cross_entropy_loss(output, set.labels.narrow(0, first, batch));
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
    if (first % 500 == 0) std::cout << "loss " << loss.item<double>() << '\n';
  }
}

// Writes up to `count` images of each of the digits 5 to 9 as FOLDER/DIGIT/NUMBER.pgm.
void write_images(const zoo::ImageSet& set, int64_t count, const fs::path& folder) {
  for (int64_t digit = 5; digit < 10; ++digit) {
    const fs::path of_class = folder / std::to_string(digit);
    fs::create_directories(of_class);
    const auto images = set.images.index({set.labels.eq(digit)}).contiguous();
    for (int64_t i = 0; i < std::min(count, images.size(0)); ++i) {
      std::ofstream file(of_class / (std::to_string(i) + ".pgm"), std::ios::binary);
      const auto image = images[i];
      file << "P5 " << image.size(1) << ' ' << image.size(0) << " 255\n";
      file.write(reinterpret_cast<const char*>(image.const_data_ptr<uint8_t>()), image.numel());
      if (!file.flush()) throw std::runtime_error("cannot write into " + of_class.string());
    }
  }
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2) {
    std::cerr << "torchscript_resnet DIR [DATA_DIR]\n";
    return 2;
  }
  const fs::path folder = argv[1];
  const std::string data_dir = argc > 2 ? argv[2] : "data/mnist";
  const auto data = zoo::load_mnist(data_dir, zoo::Split::train);
  write_images(data, 300, folder / "images/train");
  write_images(zoo::load_mnist(data_dir, zoo::Split::test), 100, folder / "images/test");

  torch::manual_seed(0);
  const auto known = data.labels.lt(5).nonzero().squeeze(1).narrow(0, 0, 3000);
  auto model = resnet18(5);
  train(model, {data.images.index_select(0, known), data.labels.index_select(0, known)});
  model.save((folder / "resnet18.pt").string());
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
