// The cost of data-parallel training, with one thread per process. Without a launcher, the program
// starts itself twice.
//
//     ddp_scaling resnet [rounds, default 5] [JSON file] [images, default 16] [edge, default 96]
//         a step of ResNet-50 with images of edge x edge: in one process, in all without
//         communication, and under DistributedDataParallel
//     ddp_scaling wire [rounds, default 20] [JSON file]    four Linear(2048, 2048), one row:
//         bytes sent and time, with gradients in fp32, fp16 and bf16
//     ddp_scaling link [rounds, default 7] [JSON file]     all_reduce of 4 KB to 100 MB
//
// benchmarks/ddp_scaling.py compares them with PyTorch's, also over slow links.
#include "benchmarks/support/interleave.h"
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "semitone/launch/launcher.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/zoo/resnet50.h"
#include "src/comm/rendezvous.h"

#include <torch/torch.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

namespace comm = semitone::comm;
namespace launch = semitone::launch;
namespace parallel = semitone::parallel;
using nlohmann::json;
using semitone::bench::Contender;
using semitone::bench::Timing;
using Clock = std::chrono::steady_clock;
using MLP = torch::nn::Sequential;

constexpr auto kComponent = "bench.ddp_scaling";
constexpr double kLr = 0.01;
constexpr double kMB = 1e6;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Between two barriers, so that a call takes as long as on its slowest rank.
Contender on_all(const std::string& name, const comm::Group& group, std::function<void()> body) {
  return {name, [group, body = std::move(body)] {
            group.barrier();
            body();
            group.barrier();
          }};
}

json to_json(const std::vector<Timing>& timings) {
  json all;
  for (const Timing& timing : timings)
    all[timing.name] = {{"min", timing.min_seconds}, {"median", timing.median_seconds}};
  return all;
}

// A model with its training method, and one batch.
template <typename Model>
struct Training {
  Training(Model its_model, at::Tensor its_input, at::Tensor its_target)
      : model(std::move(its_model)),
        input(std::move(its_input)),
        target(std::move(its_target)),
        optimizer(model->parameters(), torch::optim::SGDOptions(kLr).momentum(0.9)) {}

  void share(const comm::Group& group, const parallel::DistributedDataParallelOptions& options) {
    ddp = std::make_unique<parallel::DistributedDataParallel<Model>>(model, group, options);
  }

  void gradients() {
    optimizer.zero_grad();
    const at::Tensor output = ddp ? ddp->forward(input) : model->forward(input);
    torch::cross_entropy_loss(output, target).backward();
  }
  void step() {
    gradients();
    optimizer.step();
  }

  Model model;
  at::Tensor input, target;
  torch::optim::SGD optimizer;
  std::unique_ptr<parallel::DistributedDataParallel<Model>> ddp;
};

template <typename Model>
using MakeTraining = std::function<std::unique_ptr<Training<Model>>()>;

struct Images {
  int count;
  int edge;
};

// The same initial weights on all ranks, and another batch on each.
std::unique_ptr<Training<semitone::zoo::ResNet50>> resnet_training(int rank, Images images) {
  torch::manual_seed(0);
  const semitone::zoo::ResNet50 model;
  torch::manual_seed(1 + static_cast<std::uint64_t>(rank));
  return std::make_unique<Training<semitone::zoo::ResNet50>>(
      model, torch::randn({images.count, 3, images.edge, images.edge}),
      torch::randint(1000, {images.count}));
}

std::unique_ptr<Training<MLP>> mlp_training(int rank) {
  torch::manual_seed(0);
  MLP model;
  for (int layer = 0; layer < 4; ++layer) model->push_back(torch::nn::Linear(2048, 2048));
  torch::manual_seed(1 + static_cast<std::uint64_t>(rank));
  return std::make_unique<Training<MLP>>(model, torch::randn({1, 2048}), torch::randint(2048, {1}));
}

// Checks that the gradients under DDP are the mean of those without it.
template <typename Model>
void require_means(Training<Model>& shared, Training<Model>& alone, const comm::Group& group,
                   double tolerance, const std::string& name) {
  for (int step = 0; step < 2; ++step) {  // the second has the buckets that last
    alone.gradients();
    shared.gradients();
    const auto got = shared.model->parameters();
    const auto own = alone.model->parameters();
    for (std::size_t i = 0; i < got.size(); ++i) {
      at::Tensor want = own[i].grad().clone();
      group.all_reduce(want, comm::ReduceOp::mean);
      const double off = (got[i].grad() - want).norm().template item<double>();
      const double size = want.norm().template item<double>();
      if (!(off <= tolerance * size)) {
        throw semitone::Error(
            kComponent,
            fmt::format("the mean of the gradients within {} under {}", tolerance, name),
            fmt::format("parameter {} off by {} of {}", i, off, size));
      }
    }
  }
}

// Records when each bucket is full, and sends no gradients.
class Observer final : public parallel::CommHook {
 public:
  struct Bucket {
    double bytes = 0;
    std::vector<double> seconds;  // of each step, since its start
  };

  void begin() { start_ = Clock::now(); }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  void forget() { buckets_.clear(); }

  c10::intrusive_ptr<c10::ivalue::Future> reduce(const parallel::GradientBucket& bucket,
                                                 const comm::Group&) override {
    if (buckets_.size() <= bucket.index) buckets_.resize(bucket.index + 1);
    buckets_[bucket.index].bytes = static_cast<double>(bucket.buffer.nbytes());
    buckets_[bucket.index].seconds.push_back(seconds_since(start_));
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->markCompleted(bucket.buffer);
    return future;
  }

 private:
  Clock::time_point start_;
  std::vector<Bucket> buckets_;
};

json measure_resnet(const comm::Group& group, int rounds, Images images) {
  const auto alone = resnet_training(group.rank(), images);
  const auto shared = resnet_training(group.rank(), images);
  const auto observed = resnet_training(group.rank(), images);
  const auto observer = std::make_shared<Observer>();
  shared->share(group, {});
  observed->share(group, parallel::DistributedDataParallelOptions().comm_hook(observer));
  require_means(*shared, *alone, group, 1e-6, "DistributedDataParallel");
  // The first step has a single bucket.
  observed->gradients();
  observer->forget();

  const std::string count = fmt::format("{} processes", group.size());
  const auto timings = semitone::bench::interleave(
      {on_all("one process, the others wait", group,
              [&] {
                if (group.rank() == 0) alone->step();
              }),
       on_all(count + ", each on its own", group, [&] { alone->step(); }),
       on_all(count + ", DDP that sends no gradients", group,
              [&] {
                observer->begin();
                observed->step();
              }),
       on_all(count + ", DDP", group, [&] { shared->step(); })},
      rounds, 1);
  json buckets = json::array();
  for (const auto& bucket : observer->buckets())
    buckets.push_back({bucket.bytes, semitone::bench::median(bucket.seconds)});
  if (group.rank() == 0) {
    semitone::bench::print(fmt::format("a step of ResNet-50, {} images of {} x {}, SGD",
                                       images.count, images.edge, images.edge),
                           timings, 1e-3, "ms");
    fmt::print("DDP / each on its own: {:.3f} (min), {:.3f} (median)\n",
               timings[3].min_seconds / timings[1].min_seconds,
               timings[3].median_seconds / timings[1].median_seconds);
  }
  const auto row = [&](std::size_t i) {
    return json{{"min", timings[i].min_seconds}, {"median", timings[i].median_seconds}};
  };
  return {{"one", row(0)},       {"apart", row(1)},    {"silent", row(2)},      {"ddp", row(3)},
          {"edge", images.edge}, {"buckets", buckets}, {"images", images.count}};
}

// The bytes that this machine has sent so far on all its interfaces, as counted by the kernel:
// payload and headers. Every network namespace has its own counters.
double bytes_sent() {
  constexpr int kColumns = 8;  // of what came in, before those of what went out
  std::ifstream file("/proc/net/dev");
  double sum = 0;
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;  // the heading
    std::istringstream words(line.substr(colon + 1));
    double value = 0;
    for (int column = 0; column <= kColumns; ++column) words >> value;
    sum += value;
  }
  return sum;
}

json measure_wire(const comm::Group& group, int rounds) {
  struct Way {
    std::string name;
    parallel::DistributedDataParallelOptions options;
    double tolerance;
  };
  const std::vector<Way> ways{
      {"fp32", {}, 1e-6},
      {"fp16", parallel::DistributedDataParallelOptions().compress(torch::kHalf), 2e-3},
      {"bf16", parallel::DistributedDataParallelOptions().compress(torch::kBFloat16), 1e-2}};
  const auto alone = mlp_training(group.rank());
  std::vector<std::unique_ptr<Training<MLP>>> trainings;
  std::vector<double> bytes(ways.size());
  std::vector<int> calls(ways.size());
  std::vector<Contender> contenders{on_all("nothing", group, [&] { alone->step(); })};
  for (std::size_t i = 0; i < ways.size(); ++i) {
    trainings.push_back(mlp_training(group.rank()));
    trainings[i]->share(group, ways[i].options);
    require_means(*trainings[i], *alone, group, ways[i].tolerance, ways[i].name);
    contenders.push_back(on_all(ways[i].name, group, [&, i] {
      const double before = bytes_sent();
      trainings[i]->step();
      bytes[i] += bytes_sent() - before;
      ++calls[i];
    }));
  }
  const auto timings = semitone::bench::interleave(contenders, rounds, 1);
  json result{{"seconds", to_json(timings)}};
  for (std::size_t i = 0; i < ways.size(); ++i) result["bytes"][ways[i].name] = bytes[i] / calls[i];
  if (group.rank() == 0) {
    semitone::bench::print("a step of four Linear(2048, 2048), 67 MB of gradients in fp32, sent in",
                           timings, 1e-3, "ms");
    for (std::size_t i = 0; i < ways.size(); ++i) {
      fmt::print("{}: {:.2f} MB sent a step, {:.3f} of fp32; fp32 takes {:.2f} times as long\n",
                 ways[i].name, bytes[i] / calls[i] / kMB,
                 (bytes[i] / calls[i]) / (bytes[0] / calls[0]),
                 timings[1].median_seconds / timings[i + 1].median_seconds);
    }
  }
  return result;
}

json measure_link(const comm::Group& group, int rounds) {
  json points = json::array();
  for (const double bytes : {4e3, 64e3, 1e6, 4e6, 16e6, 25e6, 100e6}) {
    at::Tensor tensor = torch::ones({static_cast<std::int64_t>(bytes / sizeof(float))});
    group.all_reduce(tensor);
    if (!(tensor == static_cast<double>(group.size())).all().item<bool>())
      throw semitone::Error(kComponent, "the sum of the ranks' ones", "another");
    const int repeats = bytes < 1e6 ? 50 : 1;
    const auto timings =
        semitone::bench::interleave({on_all("all_reduce", group,
                                            [&] {
                                              for (int i = 0; i < repeats; ++i)
                                                group.all_reduce(tensor, comm::ReduceOp::mean);
                                            })},
                                    rounds, 1);
    const double seconds = timings[0].min_seconds / repeats;
    points.push_back({bytes, seconds, timings[0].median_seconds / repeats});
    if (group.rank() == 0)
      fmt::print("all_reduce of {:>8.3f} MB: {:>9.3f} ms, {:.2f} Gbit/s each way\n", bytes / kMB,
                 seconds * 1e3,
                 2.0 * (group.size() - 1) / group.size() * bytes * 8 / seconds / 1e9);
  }
  return {{"points", points}};
}

int start_two(int argc, char** argv) {
  launch::Launcher launcher(launch::LaunchOptions(std::filesystem::read_symlink("/proc/self/exe"))
                                .arguments({argv + 1, argv + argc})
                                .nproc_per_node(2));
  return launcher.run().exit_code();
}

}  // namespace

int main(int argc, char** argv) {
  if (comm::parse_rendezvous("env://").world_size == 1) return start_two(argc, argv);
  at::set_num_threads(1);
  const std::string what = argc > 1 ? argv[1] : "resnet";
  const auto rounds = [&](int standard) { return argc > 2 ? std::stoi(argv[2]) : standard; };
  // The checks that DistributedDataParallel's own collectives always make too.
  const auto unchecked = comm::InitOptions().backend("gloo").check(comm::CheckLevel::none);
  const comm::Group group = comm::init("env://", unchecked);
  json result;
  if (what == "resnet") {
    const auto number = [&](int at, int standard) {
      return argc > at ? std::stoi(argv[at]) : standard;
    };
    result = measure_resnet(group, rounds(5), {number(4, 16), number(5, 96)});
  } else if (what == "wire") {
    result = measure_wire(group, rounds(20));
  } else if (what == "link") {
    result = measure_link(group, rounds(7));
  } else {
    throw semitone::Error(kComponent, "resnet, wire or link", "'" + what + "'");
  }
  result["processes"] = group.size();
  if (argc > 3 && group.rank() == 0) std::ofstream(argv[3]) << result.dump(2) << '\n';
}
