// How long a training stops for a checkpoint of ResNet-50 with SGD and momentum: in save(), which
// writes the files, and in save_async(), which copies the state, or leaves that to a thread, which
// has copied it before the end of the next forward. torch::save of the same objects,
// which neither flushes nor verifies anything, is for comparison. The second table has whole steps,
// which the thread also slows by the time of cores that it takes.
//
//     checkpoint_bench [directory, default: the system's for temporary files] [rounds, default 5]
#include "benchmarks/support/check.h"
#include "benchmarks/support/interleave.h"
#include "semitone/amp/initialize.h"
#include "semitone/checkpoint.h"
#include "semitone/core/device.h"
#include "semitone/zoo/resnet50.h"

#include <torch/torch.h>

#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
namespace checkpoint = semitone::checkpoint;

// A directory that is removed at the end.
class Folder {
 public:
  explicit Folder(const fs::path& where)
      : path_(where / fmt::format("semitone_checkpoint_bench.{}", ::getpid())) {}
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::vector<at::Tensor> values_of(const torch::nn::Module& model) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& parameter : model.parameters())
    values.push_back(parameter.detach().clone());
  return values;
}

void require_same(const torch::nn::Module& model, const std::vector<at::Tensor>& want,
                  const std::string& name) {
  const std::vector<at::Tensor> got = values_of(model);
  semitone::bench::require(std::equal(got.begin(), got.end(), want.begin(), want.end(),
                                      [](const auto& a, const auto& b) { return at::equal(a, b); }),
                           name);
}

bool is_in_memory(const fs::path& path) {
  struct statfs status = {};
  return ::statfs(path.c_str(), &status) == 0 && status.f_type == TMPFS_MAGIC;
}

}  // namespace

int main(int argc, char** argv) {
  const fs::path where = argc > 1 ? fs::path(argv[1]) : fs::temp_directory_path();
  const int rounds = argc > 2 ? std::stoi(argv[2]) : 5;
  const Folder folder(where);
  torch::manual_seed(0);
  semitone::zoo::ResNet50 model(1000);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto mixed = semitone::amp::initialize(model, optimizer, semitone::amp::OptLevel::O1);
  for (at::Tensor& parameter : model->parameters())
    parameter.mutable_grad() = torch::randn_like(parameter);
  optimizer.step();

  const auto make = [&](bool in_background) {
    checkpoint::Checkpoint made(
        folder.path(), checkpoint::CheckpointOptions().keep(1).copy_in_background(in_background));
    made.add("model", *model).add("optimizer", optimizer).add("mixed", mixed);
    return made;
  };
  checkpoint::Checkpoint saved = make(false);
  checkpoint::Checkpoint in_background = make(true);
  std::int64_t step = 0;
  const auto check = [&](const std::string& name) {
    const std::vector<at::Tensor> want = values_of(*model);
    saved.wait();
    in_background.wait();
    semitone::bench::require(saved.resume() == step, name);
    require_same(*model, want, name);
  };
  saved.save(++step);
  check("save");
  saved.save_async(++step);
  check("save_async");
  in_background.save_async(++step);
  check("save_async, copied in the background");

  const at::Tensor images = torch::randn({2, 3, 224, 224});
  fmt::print("{}\nin {}{}\n\n", semitone::describe_device(at::kCPU), where.string(),
             is_in_memory(where) ? ", which is in memory: give a directory on a disk" : "");
  std::vector<double> stalls;
  std::vector<double> stalls_in_background;
  auto timings = semitone::bench::interleave(
      {{"save", [&] { saved.save(++step); }},
       {"save_async and its thread",
        [&] {
          const auto begin = Clock::now();
          saved.save_async(++step);
          stalls.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
          saved.wait();
        }},
       {"copied in the background",
        [&] {
          const auto begin = Clock::now();
          in_background.save_async(++step);
          const auto called = Clock::now();
          mixed.forward(model, images);
          const auto forward_done = Clock::now();
          in_background.wait_for_copy();
          const auto end = Clock::now();
          stalls_in_background.push_back(
              std::chrono::duration<double>((called - begin) + (end - forward_done)).count());
          in_background.wait();
        }},
       {"torch::save",
        [&] {
          torch::save(model, (folder.path() / "model").string());
          torch::save(optimizer, (folder.path() / "optimizer").string());
        }}},
      rounds, 1);
  const double save_seconds = timings.front().median_seconds;
  for (auto& [name, seconds] : {std::pair{"save_async alone", &stalls},
                                std::pair{"save_async and wait_for_copy", &stalls_in_background}}) {
    timings.push_back({name, *std::min_element(seconds->begin(), seconds->end()),
                       semitone::bench::median(*seconds)});
  }
  semitone::bench::print("a checkpoint of ResNet-50", timings, 1e-3, "ms");

  constexpr int kSteps = 4;  // longer than the thread takes
  const at::Tensor batch = torch::randn({8, 3, 224, 224});
  const at::Tensor labels = torch::arange(8);
  const auto train = [&](checkpoint::Checkpoint* checkpoint) {
    const auto begin = Clock::now();
    if (checkpoint != nullptr) checkpoint->save_async(++step);
    for (int i = 0; i < kSteps; ++i) {
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(mixed.forward(model, batch), labels);
      mixed.scale_loss(loss, optimizer).backward();
      if (checkpoint != nullptr) checkpoint->wait_for_copy();
      mixed.step(optimizer);
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (checkpoint != nullptr) checkpoint->wait();
    return seconds;
  };
  const std::array<checkpoint::Checkpoint*, 3> savers{nullptr, &saved, &in_background};
  std::array<std::vector<double>, 3> times;
  train(nullptr);
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < savers.size(); ++i) {
      const std::size_t turn = (i + static_cast<std::size_t>(round)) % savers.size();
      times.at(turn).push_back(train(savers.at(turn)));
    }
  }
  fmt::print("\n{} whole steps of 8 images: {:.0f} ms\n", kSteps,
             semitone::bench::median(times[0]) * 1e3);
  const std::array<const char*, 3> names{"", "save_async", "copied in the background"};
  for (std::size_t saver = 1; saver < savers.size(); ++saver) {
    std::vector<double> longer = times.at(saver);
    for (std::size_t i = 0; i < longer.size(); ++i) longer[i] -= times[0][i];
    const double seconds = semitone::bench::median(longer);
    fmt::print("  {:<26} {:6.1f} ms longer, {:.1f} % of save\n", names.at(saver), seconds * 1e3,
               seconds / save_seconds * 100);
  }
}
