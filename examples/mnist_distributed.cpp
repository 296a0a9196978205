// MNIST on several machines without a launcher. Start the program once on each machine: it starts
// one process for each GPU of that machine. It trains in fp32 first, and then in mixed precision.
// In PyTorch: python/mnist_distributed.py.
//
//   mnist_distributed [-n MACHINES] [-g GPUS] [-nr NUMBER] [--epochs N] [--images N] [--data DIR]
//
// -g is the number of GPUs of each machine, or of processes if it has none. -nr is the number of
// this machine, from 0. Several machines also need the address of machine 0 and a free port there,
// of which the next port is free too:
//
//   MASTER_ADDR=10.0.0.1 MASTER_PORT=8888 mnist_distributed -n 2 -g 4 -nr 0
#include <semitone/launch/spawn.h>
#include <semitone/semitone.h>
#include <semitone/zoo/convnet.h>
#include <semitone/zoo/mnist.h>

#include <torch/torch.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <iostream>
#include <map>

namespace amp = semitone::amp;
namespace comm = semitone::comm;
namespace launch = semitone::launch;
namespace parallel = semitone::parallel;
namespace zoo = semitone::zoo;

namespace {

constexpr auto kName = "mnist_distributed";

struct Arguments {
  int machines = 1;
  int gpus = 1;
  int number = 0;
  int epochs = 1;
  int images = 60'000;
  std::string data = "data/mnist";
};

int parse_number(const std::string& name, const std::string& text) {
  int number = -1;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end || number < 0)
    throw semitone::Error(kName, "a number from 0 for " + name, "'" + text + "'");
  return number;
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  const std::map<std::string, int*> numbers{{"-n", &arguments.machines},
                                            {"-g", &arguments.gpus},
                                            {"-nr", &arguments.number},
                                            {"--epochs", &arguments.epochs},
                                            {"--images", &arguments.images}};
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    const std::string value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--data") {
      arguments.data = value;
    } else if (const auto found = numbers.find(flag); found != numbers.end()) {
      *found->second = parse_number(flag, value);
    } else {
      throw semitone::Error(kName, "-n, -g, -nr, --epochs, --images or --data", "'" + flag + "'");
    }
  }
  return arguments;
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr) {
    throw semitone::Error(kName, std::string(name) + " in the environment, for several machines",
                          "none", "set MASTER_ADDR to an address of machine 0, and MASTER_PORT");
  }
  return value;
}

// What a process trains and tests with.
struct Task {
  comm::Group group;
  zoo::ImageSet train;
  zoo::ImageSet test;
  Arguments arguments;
};

struct Batch {
  torch::Tensor images;
  torch::Tensor labels;
};

Batch batch_of(const zoo::ImageSet& data, const std::vector<size_t>& numbers, at::Device device) {
  const auto rows = torch::tensor(std::vector<int64_t>(numbers.begin(), numbers.end()));
  const auto images = data.images.index_select(0, rows).unsqueeze(1).to(device, torch::kFloat);
  return {images.div(255), data.labels.index_select(0, rows).to(device)};
}

// The loop of both trainings. `step` trains on a batch of this process, and returns the loss.
template <typename Step>
void train(const Task& task, const std::string& name, const Step& step) {
  const int64_t size = std::min<int64_t>(task.arguments.images, task.train.size());
  parallel::DistributedSampler sampler(static_cast<size_t>(size), task.group.size(),
                                       task.group.rank());
  for (int epoch = 0; epoch < task.arguments.epochs; ++epoch) {
    sampler.set_epoch(static_cast<size_t>(epoch));
    sampler.reset();
    for (int i = 1; const auto numbers = sampler.next(100); ++i) {
      const at::Tensor loss = step(batch_of(task.train, *numbers, task.group.device()));
      if (task.group.rank() == 0 && i % 20 == 0) {
        std::cout << name << ", epoch " << epoch + 1 << ", step " << i << ": loss "
                  << loss.item<double>() << '\n'
                  << std::flush;
      }
    }
  }
}

// Tests in all processes, and shows the accuracy. `predict` returns the logits of images.
template <typename Predict>
void test(const Task& task, const std::string& name, const Predict& predict) {
  const torch::NoGradGuard no_grad;
  parallel::EvaluationSampler sampler(static_cast<size_t>(task.test.size()), task.group.size(),
                                      task.group.rank());
  auto correct = torch::zeros({1}, torch::dtype(torch::kLong).device(task.group.device()));
  while (const auto numbers = sampler.next(500)) {
    const auto batch = batch_of(task.test, *numbers, task.group.device());
    correct += predict(batch.images).argmax(1).eq(batch.labels).sum();
  }
  task.group.all_reduce(correct);
  const double percent = 100 * correct.item<double>() / static_cast<double>(task.test.size());
  if (task.group.rank() == 0) {
    std::cout << name << " on " << task.group.size() << " processes: accuracy " << percent << " %"
              << '\n'
              << std::flush;
  }
  if (percent < 90) throw semitone::Error(kName, "an accuracy of 90 %", std::to_string(percent));
}

void in_fp32(const Task& task) {
  torch::manual_seed(0);
  zoo::ConvNet model;
  model->to(task.group.device());
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  parallel::DistributedDataParallel ddp(model, task.group);
  train(task, "fp32", [&](const Batch& batch) {
    optimizer.zero_grad();
    auto loss = torch::cross_entropy_loss(ddp.forward(batch.images), batch.labels);
    loss.backward();
    optimizer.step();
    return loss;
  });
  model->eval();
  test(task, "fp32", [&](const torch::Tensor& images) { return model->forward(images); });
}

void in_mixed_precision(const Task& task) {
  torch::manual_seed(0);
  zoo::ConvNet model;
  model->to(task.group.device());
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  auto mixed = amp::initialize(model, optimizer, amp::Options("O2").verbosity(0));
  parallel::DistributedDataParallel ddp(model, task.group);
  train(task, "mixed", [&](const Batch& batch) {
    optimizer.zero_grad();
    auto loss = torch::cross_entropy_loss(mixed.forward(ddp, batch.images), batch.labels);
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
    return loss;
  });
  model->eval();
  test(task, "mixed", [&](const torch::Tensor& images) { return mixed.forward(model, images); });
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments arguments = parse(argc, argv);
  auto options = launch::this_program()
                     .nnodes({arguments.machines, arguments.machines})
                     .nproc_per_node(arguments.gpus)
                     .node_rank(arguments.number);
  if (arguments.machines > 1) {
    options.master_addr(variable("MASTER_ADDR"))
        .master_port(parse_number("MASTER_PORT", variable("MASTER_PORT")));
  }
  const auto train_in_this_process = [&](int /*local_rank*/) {
    // The rank is NUMBER * GPUS + local_rank, and the world size MACHINES * GPUS.
    Task task{comm::init(), zoo::load_mnist(arguments.data, zoo::Split::train),
              zoo::load_mnist(arguments.data, zoo::Split::test), arguments};
    in_fp32(task);
    in_mixed_precision(task);
  };
  return launch::spawn(train_in_this_process, options).exit_code();
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
