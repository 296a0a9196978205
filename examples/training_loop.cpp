// What a training loop needs beside its steps: gradient accumulation, a learning rate schedule, and
// an average of the weights for evaluation.
//
//   training_loop [O0|O1|O2|O3] [DATA_DIR]
#include <semitone/amp.h>
#include <semitone/optim.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <iostream>

namespace amp = semitone::amp;
namespace optim = semitone::optim;
namespace zoo = semitone::zoo;

namespace {

torch::Tensor images_of(const zoo::ImageSet& data, int64_t first, int64_t count) {
  return data.images.narrow(0, first, count).unsqueeze(1).to(torch::kFloat).div_(255);
}

double accuracy(amp::MixedPrecision& mixed, zoo::ConvNet& model, const zoo::ImageSet& data) {
  const torch::NoGradGuard no_grad;
  model->eval();
  const int64_t count = 500;
  const auto predicted = mixed.forward(model, images_of(data, 0, count)).argmax(1);
  model->train();
  return predicted.eq(data.labels.narrow(0, 0, count)).to(torch::kFloat).mean().item<double>();
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string data_dir = argc > 2 ? argv[2] : "data/mnist";
  const auto data = zoo::load_mnist(data_dir, zoo::Split::train);
  const auto test = zoo::load_mnist(data_dir, zoo::Split::test);
  torch::manual_seed(0);
  zoo::ConvNet model;
  optim::FusedAdam optimizer(model->parameters(), 2e-3);
  auto mixed = amp::initialize(model, optimizer, amp::Options(argc > 1 ? argv[1] : "O2"));

  const int64_t steps = 60;
  const int64_t parts = 4;
  const int64_t rows = 25;  // of a micro-batch
  optim::LRScheduler scheduler(
      optimizer,
      optim::SequentialLR({optim::LinearLR(10), optim::CosineAnnealingLR(steps - 10)}, {10}));
  optim::ExponentialMovingAverage ema(*model, 0.9);
  for (int64_t step = 0; step < steps; ++step) {
    const auto loss = amp::accumulate(mixed, optimizer, parts, [&](int64_t part) {
      const int64_t first = (step * parts + part) * rows;
      return torch::cross_entropy_loss(mixed.forward(model, images_of(data, first, rows)),
                                       data.labels.narrow(0, first, rows));
    });
    const double lr = scheduler.get_last_lr()[0];
    if (mixed.step(optimizer) == amp::Step::stepped) {  // a skipped step counts nowhere
      scheduler.step();
      ema.update();
    }
    mixed.zero_grad(optimizer);
    if (step % 10 == 0)
      std::cout << "step " << step << ": lr " << lr << ", loss " << loss.item<double>() << '\n';
  }
  std::cout << "accuracy " << accuracy(mixed, model, test);
  const auto averaged = ema.apply();  // until the end of the scope
  const double of_average = accuracy(mixed, model, test);
  std::cout << ", with averaged weights " << of_average << '\n';
  return of_average > 0.8 ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
