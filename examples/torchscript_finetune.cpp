// Fine-tunes a TorchScript ResNet on a folder of images. The pretrained network gets a new
// classifier, and its BatchNorm layers are frozen. In PyTorch: python/torchscript_finetune.py.
//
//   torchscript_finetune MODEL.pt IMAGES FINETUNED.pt [SIZE]
//
// MODEL.pt comes from Python, for example from
//
//   torch.jit.script(torchvision.models.resnet18(weights="DEFAULT")).save("MODEL.pt")
//
// or from torchscript_resnet, which needs no Python. IMAGES has a sub-folder for each class
// (zoo/image_folder.h), and the images are scaled to SIZE, by default 224. FINETUNED.pt is for
// torch.jit.load, in Python or C++. The exit code is 0 if at least 90 % of the test images are
// classified correctly, and the statistics of BatchNorm are those of MODEL.pt.
#include <semitone/amp.h>
#include <semitone/core/device.h>
#include <semitone/optim.h>
#include <semitone/zoo/image_folder.h>

#include <torch/script.h>
#include <torch/torch.h>

#include <cstddef>
#include <iostream>
#include <string>
#include <vector>

namespace amp = semitone::amp;
namespace optim = semitone::optim;
namespace zoo = semitone::zoo;

namespace {

// Gives the last layer, which torchvision's ResNets call fc, new weights for other classes.
void replace_classifier(torch::jit::Module& model, int64_t classes) {
  torch::jit::Module fc = model.attr("fc").toModule();
  const torch::Tensor old_weight = fc.attr("weight").toTensor();
  torch::nn::Linear classifier(old_weight.size(1), classes);
  classifier->to(old_weight.device());
  fc.setattr("weight", classifier->weight);
  fc.setattr("bias", classifier->bias);
}

// Keeps the statistics and the weights of the pretrained BatchNorm layers. Call it again after
// model.train(), which lets the layers update their statistics.
void freeze_batch_norm(torch::jit::Module& model) {
  for (torch::jit::Module layer : model.modules()) {
    if (!layer.hasattr("running_mean")) continue;
    layer.eval();
    for (torch::Tensor parameter : layer.parameters(/*recurse=*/false))
      parameter.set_requires_grad(false);
  }
}

// Returns images on the device as the pretrained network expects them: normalised with the mean and
// the standard deviation of ImageNet.
torch::Tensor normalise(const torch::Tensor& images, torch::Device device) {
  const auto mean = torch::tensor({0.485, 0.456, 0.406}, torch::kFloat).view({3, 1, 1});
  const auto deviation = torch::tensor({0.229, 0.224, 0.225}, torch::kFloat).view({3, 1, 1});
  return (images.to(device, torch::kFloat).div_(255) - mean.to(device)) / deviation.to(device);
}

double accuracy(amp::MixedPrecision& mixed, torch::jit::Module& model, const zoo::ImageSet& set,
                torch::Device device) {
  const torch::NoGradGuard no_grad;
  model.eval();
  int64_t correct = 0;
  for (const auto& rows : torch::arange(set.size()).split(100)) {
    const auto images = normalise(set.images.index_select(0, rows), device);
    const auto predicted = mixed.forward(model, images).toTensor().argmax(1);
    correct += predicted.eq(set.labels.index_select(0, rows).to(device)).sum().item<int64_t>();
  }
  return static_cast<double>(correct) / static_cast<double>(set.size());
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::cerr << "torchscript_finetune MODEL.pt IMAGES FINETUNED.pt [SIZE]\n";
    return 2;
  }
  const auto options = zoo::ImageFolderOptions().size(argc > 4 ? std::stoll(argv[4]) : 224);
  const auto data = zoo::load_image_folder(argv[2], zoo::Split::train, options);
  const auto test = zoo::load_image_folder(argv[2], zoo::Split::test, options);
  const torch::Device device = semitone::default_device();
  torch::manual_seed(0);

  auto model = torch::jit::load(argv[1], device);
  replace_classifier(model, data.classes);
  freeze_batch_norm(model);
  std::vector<torch::Tensor> statistics;
  for (const torch::Tensor& buffer : model.buffers()) statistics.push_back(buffer.clone());
  std::vector<torch::Tensor> trained;
  for (const torch::Tensor& parameter : model.parameters())
    if (parameter.requires_grad()) trained.push_back(parameter);
  torch::optim::SGD optimizer(trained, torch::optim::SGDOptions(0.01).momentum(0.9));
  auto mixed = amp::initialize(model, optimizer, amp::Options("O1").choose_memory_format());
  const double before = accuracy(mixed, model, test, device);

  const int64_t epochs = 3;
  const int64_t batch = 50;
  const int64_t batches = (data.size() + batch - 1) / batch;
  optim::LRScheduler scheduler(optimizer, optim::CosineAnnealingLR(epochs * batches));
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    model.train();
    freeze_batch_norm(model);
    double mean_loss = 0;
    for (const auto& rows : torch::randperm(data.size()).split(batch)) {
      const auto images = normalise(data.images.index_select(0, rows), device);
      const auto labels = data.labels.index_select(0, rows).to(device);
      optimizer.zero_grad();
      const auto output = mixed.forward(model, images).toTensor();
      const auto loss = torch::cross_entropy_loss(output, labels);
      mixed.scale_loss(loss, optimizer).backward();
      if (mixed.step(optimizer) == amp::Step::stepped) scheduler.step();
      mean_loss += loss.item<double>() / static_cast<double>(batches);
    }
    std::cout << "epoch " << epoch << ": loss " << mean_loss << '\n';
  }

  const double after = accuracy(mixed, model, test, device);
  bool unchanged = !statistics.empty();
  std::size_t i = 0;
  for (const torch::Tensor& buffer : model.buffers())
    unchanged = unchanged && torch::equal(buffer, statistics.at(i++));
  mixed.save_model(model, argv[3]);
  std::cout << "accuracy " << before << " -> " << after << ", statistics of BatchNorm "
            << (unchanged ? "unchanged" : "changed") << '\n';
  return after >= 0.9 && unchanged ? 0 : 1;
} catch (const c10::Error& error) {  // of torch::jit::load, for example
  std::cerr << error.what_without_backtrace() << '\n';
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
