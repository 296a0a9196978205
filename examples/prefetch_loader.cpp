// Batches that are ready in time: a torch::data loader, read ahead and copied to the device on a
// stream of its own.
//
//   prefetch_loader [DATA_DIR]
#include <semitone/semitone.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>
#include <optional>

namespace amp = semitone::amp;
namespace data = semitone::data;
namespace zoo = semitone::zoo;

namespace {

// MNIST for a DataLoader: uint8 images, which take a quarter of the bytes of fp32.
class Digits : public torch::data::datasets::Dataset<Digits> {
 public:
  explicit Digits(const zoo::ImageSet& set) : set_(set) {}
  torch::data::Example<> get(size_t index) override {
    const auto row = static_cast<int64_t>(index);
    return {set_.images[row].unsqueeze(0), set_.labels[row]};
  }
  std::optional<size_t> size() const override { return static_cast<size_t>(set_.size()); }

 private:
  zoo::ImageSet set_;
};

// Runs on the device, while the training computes on earlier batches.
torch::data::Example<> normalise(const torch::data::Example<>& batch) {
  return {batch.data.to(torch::kFloat).div(255), batch.target};
}

}  // namespace

int main(int argc, char** argv) try {
  auto set = zoo::load_mnist(argc > 1 ? argv[1] : "data/mnist", zoo::Split::train);
  // A part, for a short run.
  set.images = set.images.slice(0, 0, 6400);
  set.labels = set.labels.slice(0, 0, 6400);
  const auto device = semitone::default_device();
  torch::manual_seed(0);
  const auto loader = torch::data::make_data_loader(
      Digits(set).map(torch::data::transforms::Stack<>()), /*batch_size=*/64);
  data::PrefetchLoader batches(*loader, device, normalise);

  zoo::ConvNet model;
  model->to(device);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto mixed = amp::initialize(model, optimizer, amp::Options("O1").choose_memory_format());
  double first = 0;
  double last = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    double sum = 0;
    int steps = 0;
    for (auto& batch : batches) {
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(mixed.forward(model, batch.data), batch.target);
      mixed.scale_loss(loss, optimizer).backward();
      mixed.step(optimizer);
      sum += loss.item<double>();
      ++steps;
    }
    last = sum / steps;
    if (epoch == 0) first = last;
  }
  std::cout << "mean loss of an epoch " << first << " -> " << last << '\n';
  return last < first / 2 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
