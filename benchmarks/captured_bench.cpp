// Steps as CUDA graphs beside the same steps operator by operator, at every opt level. On a CPU both
// run operator by operator, and the JSON says that nothing was captured.
//
//     captured_bench [--device cuda] [--rounds N] [--steps N] [--json FILE]
#include "benchmarks/support/interleave.h"
#include "semitone/amp/captured_step.h"
#include "semitone/amp/initialize.h"
#include "semitone/amp/mixed_precision.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/zoo/convnet.h"
#include "semitone/zoo/encoder.h"
#include "src/core/file.h"

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace amp = semitone::amp;
namespace bench = semitone::bench;
namespace zoo = semitone::zoo;
using nlohmann::ordered_json;

constexpr auto kComponent = "bench.captured";
constexpr double kLr = 1e-4;
constexpr std::int64_t kDigits = 10;
constexpr std::int64_t kDigitSize = 28;
// An encoder whose step is short: launching is a large part of it.
constexpr std::int64_t kLength = 64;
constexpr std::int64_t kWidth = 256;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kLayers = 2;
constexpr std::int64_t kVocabulary = 1000;
constexpr int kWarmUp = 10;  // steps; CapturedStep captures the fourth

struct Flags {
  std::string device = "cpu";
  int rounds = 10;
  int steps = 50;
  std::string json;
};

struct Data {
  at::Tensor inputs;
  at::Tensor targets;
};

struct Precision {
  amp::OptLevel level;
  c10::ScalarType dtype;
};

// A model with its optimizer, trained by operators or captured.
template <typename Model>
class Training {
 public:
  Training(Model model, Data data, const Precision& precision, bool captured)
      : model_(std::move(model)),
        data_(std::move(data)),
        optimizer_(model_->parameters(), semitone::optim::FusedAdamOptions(kLr)),
        mixed_(amp::initialize(model_, optimizer_, options_of(precision))) {
    if (captured) {
      step_ = std::make_unique<amp::CapturedStep>(
          mixed_, optimizer_,
          [this](const std::vector<at::Tensor>& batch) { return loss_of(batch[0], batch[1]); });
    }
  }

  void step() {
    if (step_) {
      loss_ = step_->run({data_.inputs, data_.targets}).loss;
      return;
    }
    optimizer_.zero_grad();
    const at::Tensor loss = loss_of(data_.inputs, data_.targets);
    mixed_.scale_loss(loss, optimizer_).backward();
    mixed_.step(optimizer_);
    loss_ = loss.detach();
  }

  double loss() const { return loss_.template item<double>(); }
  bool is_captured() const { return step_ && step_->is_captured(); }

 private:
  static amp::Options options_of(const Precision& precision) {
    amp::Options options(precision.level);
    options.verbosity(0);
    if (precision.level != amp::OptLevel::O0) options.dtype(precision.dtype);
    return options;
  }

  at::Tensor loss_of(const at::Tensor& inputs, const at::Tensor& targets) {
    return at::cross_entropy_loss(mixed_.forward(model_, inputs).to(at::kFloat), targets);
  }

  Model model_;
  Data data_;
  semitone::optim::FusedAdam optimizer_;
  amp::MixedPrecision mixed_;
  std::unique_ptr<amp::CapturedStep> step_;
  at::Tensor loss_;
};

// Losses must be finite and fall.
template <typename Model>
void warm_up(Training<Model>& training, const std::string& name) {
  training.step();
  const double first = training.loss();
  for (int i = 1; i < kWarmUp; ++i) training.step();
  const double last = training.loss();
  if (!(std::isfinite(last) && last < first)) {
    throw semitone::Error(kComponent, "losses that fall of " + name,
                          fmt::format("{} and then {}", first, last));
  }
}

template <typename Model>
ordered_json measure(const std::function<Model()>& make, const Data& data,
                     const Precision& precision, const Flags& flags) {
  const auto new_model = [&] {
    torch::manual_seed(0);
    Model model = make();
    model->to(data.inputs.device());
    return model;
  };
  Training<Model> plain(new_model(), data, precision, false);
  Training<Model> captured(new_model(), data, precision, true);
  warm_up(plain, "steps by operators");
  warm_up(captured, "captured steps");
  const at::Device device = data.inputs.device();
  const auto wait = [device] {
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
  };
  const auto timings = bench::interleave(
      {{"by operators", [&] { plain.step(); }}, {"captured", [&] { captured.step(); }}},
      flags.rounds, flags.steps, wait);
  return {{"captured", captured.is_captured()},
          {"by_operators_seconds", timings[0].median_seconds},
          {"captured_seconds", timings[1].median_seconds},
          {"by_operators_min_seconds", timings[0].min_seconds},
          {"captured_min_seconds", timings[1].min_seconds}};
}

Data digits(std::int64_t count, at::Device device) {
  torch::manual_seed(1);
  return {torch::randn({count, 1, kDigitSize, kDigitSize}).to(device),
          torch::randint(kDigits, {count}, torch::kLong).to(device)};
}

Data tokens(std::int64_t count, at::Device device) {
  torch::manual_seed(1);
  const auto text = torch::randint(kVocabulary, {count, kLength}, torch::kLong).to(device);
  return {text, text.flatten()};
}

zoo::Encoder small_encoder() {
  return zoo::Encoder(zoo::EncoderOptions()
                          .layers(kLayers)
                          .width(kWidth)
                          .heads(kHeads)
                          .ffn(4 * kWidth)
                          .dropout(0)
                          .vocabulary(kVocabulary));
}

// The row of a model and a level. What cannot be captured has its reason in the place of times.
ordered_json row_of(const std::string& model, std::int64_t count, const Precision& precision,
                    const Flags& flags) {
  const at::Device device(flags.device);
  ordered_json row{
      {"model", model},
      {"level", amp::name_of(precision.level)},
      {"dtype",
       precision.level == amp::OptLevel::O0 ? "float32" : semitone::dtype_name(precision.dtype)},
      {"batch_size", count}};
  try {
    row.update(model == "convnet"
                   ? measure<zoo::ConvNet>([] { return zoo::ConvNet(); }, digits(count, device),
                                           precision, flags)
                   : measure<zoo::Encoder>(small_encoder, tokens(count, device), precision, flags));
  } catch (const std::exception& error) {
    row["captured"] = false;
    row["reason"] = error.what();
  }
  return row;
}

ordered_json rows_of(const Flags& flags) {
  constexpr std::int64_t kImages = 100;
  constexpr std::int64_t kSequences = 8;
  ordered_json rows = ordered_json::array();
  for (const auto* const model : {"convnet", "encoder"}) {
    const std::int64_t count = model == std::string("convnet") ? kImages : kSequences;
    rows.push_back(row_of(model, count, {amp::OptLevel::O0, at::kFloat}, flags));
    for (const auto level : {amp::OptLevel::O1, amp::OptLevel::O2, amp::OptLevel::O3}) {
      for (const auto dtype : {at::kHalf, at::kBFloat16})
        rows.push_back(row_of(model, count, {level, dtype}, flags));
    }
  }
  return rows;
}

void print(const ordered_json& row) {
  const auto text = [&](const char* key) { return row[key].get<std::string>(); };
  fmt::print("{:<8} {} {:<9} ", text("model"), text("level"), text("dtype"));
  if (row.contains("reason")) {
    fmt::print("{}\n", text("reason"));
    return;
  }
  const double plain = row["by_operators_seconds"];
  const double captured = row["captured_seconds"];
  fmt::print("{:>9.3f} {:>9.3f} {:>6.2f} {}\n", 1e3 * plain, 1e3 * captured, plain / captured,
             row["captured"].get<bool>() ? "" : "not captured: both by operators");
}

void run(const Flags& flags) {
  if (!flags.json.empty()) semitone::require_writable(flags.json, kComponent);
  fmt::print("{:<8} {:<2} {:<9} {:>9} {:>9} {:>6}\n", "model", "", "dtype", "ms", "captured",
             "ratio");
  const ordered_json rows = rows_of(flags);
  for (const ordered_json& row : rows) print(row);
  if (flags.json.empty()) return;
  const ordered_json all{
      {"device", flags.device}, {"rounds", flags.rounds}, {"steps", flags.steps}, {"rows", rows}};
  semitone::write_file(flags.json, all.dump(2) + "\n", kComponent);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Times training steps as CUDA graphs and operator by operator.", "captured_bench");
  app.add_option("--device", flags.device, "cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--rounds", flags.rounds, "turns of each")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--steps", flags.steps, "steps in a turn")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app.add_option("--json", flags.json, "where the figures go as well");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    run(flags);
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "[libtorch] " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
  }
  return 1;
}
