// A training that reads a loader as it is, and ahead of time. Its samples are decoded one after the
// other on one core, as images of a file are; the model is a layer with its gradients. On an
// accelerator the batches are also copied to it.
//
//     prefetch_bench [batches of a pass, default 30] [rounds, default 5]
#include "benchmarks/support/check.h"
#include "benchmarks/support/interleave.h"
#include "semitone/core/device.h"
#include "semitone/data/prefetch_loader.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace {

namespace data = semitone::data;

constexpr std::int64_t kPixels = std::int64_t{3} * 64 * 64;
constexpr std::int64_t kBatch = 32;
constexpr std::int64_t kFeatures = 1024;

// Every pixel depends on the one before, as in the decoder of a compressed image.
struct Decoder : torch::data::datasets::Dataset<Decoder, torch::data::TensorExample> {
  explicit Decoder(std::int64_t its_size) : samples(its_size) {}
  torch::data::TensorExample get(std::size_t index) override {
    constexpr int kStepsOfPixel = 20;
    at::Tensor pixels = torch::empty({kPixels});
    auto* const out = pixels.mutable_data_ptr<float>();
    auto state = static_cast<std::uint32_t>(index);
    for (std::int64_t i = 0; i < kPixels; ++i) {
      for (int step = 0; step < kStepsOfPixel; ++step) state = state * 1664525U + 1013904223U;
      out[i] = static_cast<float>(state >> 8) / 16777216.0F - 0.5F;
    }
    return pixels;
  }
  std::optional<std::size_t> size() const override { return samples; }

  std::int64_t samples;
};

auto make_loader(std::int64_t batches) {
  return torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Decoder(batches * kBatch).map(torch::data::transforms::Stack<torch::data::TensorExample>()),
      static_cast<std::size_t>(kBatch));
}

// A step of the model. Its sum is read by the host, as a training reads its loss.
double step(torch::nn::Linear& model, const at::Tensor& input) {
  model->zero_grad();
  const at::Tensor loss = model->forward(input).square().mean();
  loss.backward();
  return loss.item<double>();
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t count = argc > 1 ? std::stoll(argv[1]) : 30;
  const int rounds = argc > 2 ? std::stoi(argv[2]) : 5;
  const c10::Device device = semitone::default_device();
  torch::manual_seed(0);
  torch::nn::Linear model(kPixels, kFeatures);
  model->to(device);
  const auto loader = make_loader(count);
  data::PrefetchLoader ahead(*loader, device);
  data::PrefetchLoader here(*loader, data::PrefetchOptions(device).background(false));

  std::vector<at::Tensor> want;
  for (auto& batch : *loader) want.push_back(batch.data);
  const auto check = [&](auto& batches, const std::string& name) {
    std::size_t at = 0;
    for (auto& batch : batches) {
      semitone::bench::require(at < want.size() && at::equal(batch.data.cpu(), want[at]), name);
      ++at;
    }
    semitone::bench::require(at == want.size(), name);
  };
  check(ahead, "the loader's batches, read ahead");
  check(here, "the loader's batches, read by the same thread");

  const at::Tensor one = want.front().to(device);
  std::vector<double> losses;
  const auto train = [&](auto& batches) {
    losses.clear();
    for (auto& batch : batches) losses.push_back(step(model, batch.data.to(device)));
  };
  fmt::print("{}\n\n", semitone::describe_device(device.type()));
  const auto timings =
      semitone::bench::interleave({{"loader", [&] { train(*loader); }},
                                   {"PrefetchLoader", [&] { train(ahead); }},
                                   {"PrefetchLoader, background(false)", [&] { train(here); }},
                                   {"decoding alone",
                                    [&] {
                                      losses.clear();
                                      for (auto& batch : *loader)
                                        losses.push_back(static_cast<double>(batch.data.size(0)));
                                    }},
                                   {"training alone",
                                    [&] {
                                      for (std::int64_t i = 0; i < count; ++i) step(model, one);
                                    }}},
                                  rounds, 1);
  semitone::bench::print(fmt::format("a batch of {} samples", kBatch), timings, 1e-3, "ms",
                         static_cast<double>(count));
}
