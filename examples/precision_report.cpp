// What fp16 does to a model: a training records itself, and a report says what to change. On the
// command line `semitone report RUN_DIR` makes the same report, and
// `semitone report RUN_DIR --compare OTHER_RUN_DIR` compares two runs.
//
//   precision_report [DATA_DIR [RUN_DIR]]
#include <semitone/amp.h>
#include <semitone/report.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <iostream>

namespace amp = semitone::amp;
namespace report = semitone::report;
namespace zoo = semitone::zoo;

namespace {

void train(const zoo::ImageSet& set, const std::filesystem::path& directory) {
  torch::manual_seed(0);
  zoo::ConvNet model;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto mixed = amp::initialize(model, optimizer,
                               amp::Options("O1").dtype(torch::kHalf).loss_scale(1.0).verbosity(0));

  report::RunLog log(directory, report::RunLogOptions().config({{"dtype", "float16"}}));
  report::Recorder recorder(log, *model, report::RecorderOptions().every(10));
  for (std::int64_t step = 1; step <= 40; ++step) {
    log.set_step(step);
    const auto images = set.images.narrow(0, 64 * (step - 1), 64);
    const auto labels = set.labels.narrow(0, 64 * (step - 1), 64);
    optimizer.zero_grad();
    const auto loss = torch::cross_entropy_loss(
        mixed.forward(model, images.unsqueeze(1).to(torch::kFloat).div(255)), labels);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
    log.add_scalar("train/loss", loss.item<double>());
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const auto set = zoo::load_mnist(argc > 1 ? argv[1] : "data/mnist", zoo::Split::train);
  const std::filesystem::path directory = argc > 2 ? argv[2] : "runs/precision_report";
  if (argc <= 2) std::filesystem::remove_all(directory);  // of an earlier call
  train(set, directory);

  const report::PrecisionReport explained(directory);
  std::cout << explained.to_text();
  explained.write_html(directory / "report.html");
  std::cout << "\nwith charts: " << (directory / "report.html").string() << '\n';
  return explained.verdicts().empty() ? 1 : 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
