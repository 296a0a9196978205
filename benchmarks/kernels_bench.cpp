// Every kernel that training uses: first checked, then timed in interleaved rounds with LibTorch's
// implementation and with a baseline of the machine. docs/benchmarking.md explains the columns.
//
//     kernels_bench [--only REGEX] [--rounds N] [--json FILE] [--small] [--device cuda]
//
// On a GPU these are the kernels that Semitone has for CUDA.
#include "benchmarks/kernels/cases.h"
#include "benchmarks/support/interleave.h"
#include "benchmarks/support/stream.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/version.h"
#include "src/core/file.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <malloc.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <map>
#include <optional>
#include <regex>
#include <string>
#include <vector>

namespace {

namespace bench = semitone::bench;
using bench::Case;
using bench::Contender;
using bench::Row;
using bench::Sizes;
using bench::Timing;
using nlohmann::ordered_json;

constexpr auto kComponent = "bench.kernels";

struct Flags {
  int rounds = 7;
  std::string only;
  std::string json;
  bool small = false;
  std::string device = "cpu";
};

// The baseline of the machine: memory bandwidth, or the fastest product of large squares.
struct Baseline {
  Contender contender;
  double work;  // bytes or operations of a call
};

// Waits for what a device still has to do.
std::function<void()> waiting_for(c10::Device device) {
  return [device] {
    if (!device.is_cpu()) torch::cuda::synchronize(device.index());
  };
}

class Baselines {
 public:
  explicit Baselines(const Sizes& sizes)
      : device_(sizes.device),
        peak_(sizes.peak),
        stream_(sizes.stream, sizes.device),
        memory_{stream_.contender(), stream_.bytes()} {}

  const Baseline& of(const Row& row, c10::ScalarType dtype) {
    if (!row.is_product()) return memory_;
    const auto [place, is_new] = products_.try_emplace(dtype);
    if (is_new) place->second = fastest_product(dtype);
    return place->second;
  }

 private:
  // Products of squares, in both layouts of the second: by rows, and by columns like a layer's
  // weight.
  Baseline fastest_product(c10::ScalarType dtype) const {
    constexpr int kRounds = 5;
    std::vector<Baseline> products;
    for (const std::int64_t edge : peak_) {
      const auto random = [&] { return torch::randn({edge, edge}, device_).to(dtype); };
      const auto n = static_cast<double>(edge);
      for (const bool by_columns : {false, true}) {
        const auto b = by_columns ? random().t() : random();
        products.push_back(
            {{fmt::format("matmul {} of {} x {}", by_columns ? "NT" : "NN", edge, edge),
              [a = random(), b] { at::mm(a, b); }},
             2 * n * n * n});
      }
    }
    std::vector<Contender> contenders;
    contenders.reserve(products.size());
    for (const Baseline& product : products) contenders.push_back(product.contender);
    const auto timings = bench::interleave(contenders, kRounds, 1, waiting_for(device_));
    const auto rate = [&](std::size_t i) { return products[i].work / timings[i].min_seconds; };
    std::size_t best = 0;
    for (std::size_t i = 1; i < products.size(); ++i) {
      if (rate(i) > rate(best)) best = i;
    }
    return products[best];
  }

  c10::Device device_;
  std::vector<std::int64_t> peak_;
  bench::Stream stream_;
  Baseline memory_;
  std::map<c10::ScalarType, Baseline> products_;
};

struct Result {
  Timing kernel;
  std::optional<Timing> libtorch;
  Timing baseline;
  double work;
  double baseline_work;

  double rate() const { return work / kernel.min_seconds; }
  double baseline_rate() const { return baseline_work / baseline.min_seconds; }
  double share() const { return rate() / baseline_rate(); }
  // Above 1 if LibTorch takes longer.
  double ratio() const { return libtorch->min_seconds / kernel.min_seconds; }
};

double work_of(const Row& row) {
  double work = row.operations;
  for (const auto& moved : row.moved) work += moved.bytes;
  return work;
}

// Calls of a contender in a round. A GPU's are launched one after the other, and then waited for.
constexpr int kCallsOnGpu = 20;

// The baseline runs before each, so that neither finds its data in a warm cache.
Result measure(const Row& row, const Baseline& baseline, int rounds, at::Device device) {
  std::vector<Contender> contenders{{"Semitone", row.work}, baseline.contender};
  if (row.libtorchs) {
    contenders.push_back({"LibTorch", row.libtorchs});
    contenders.push_back(baseline.contender);
  }
  const int calls = device.is_cpu() ? 1 : kCallsOnGpu;
  const auto timings = bench::interleave(contenders, rounds, calls, waiting_for(device));
  Result result{timings[0], std::nullopt, timings[1], work_of(row), baseline.work};
  if (row.libtorchs) {
    result.libtorch = timings[2];
    result.baseline.min_seconds = std::min(timings[1].min_seconds, timings[3].min_seconds);
    result.baseline.median_seconds = (timings[1].median_seconds + timings[3].median_seconds) / 2;
  }
  return result;
}

std::string counts_of(const Row& row) {
  std::string text;
  for (const auto& moved : row.moved) text += (text.empty() ? "" : " ") + moved.name;
  return text;
}

std::string name_of(const Case& of, const Row& row) {
  return row.pass.empty() ? of.kernel : of.kernel + ", " + row.pass;
}

void print_head(bool products) {
  fmt::print("\n{:<34} {:<8} {:<17} {:<15} {:>7} {:>7} {:>6} {:>4} {:>8} {:>5}\n",
             products ? "product" : "kernel", "dtype", "shape", products ? "" : "counts", "ms",
             "median", products ? "GFLOPs" : "GB/s", "%", "LibTorch", "ratio");
}

void print(const Case& of, const Row& row, const Result& result) {
  fmt::print("{:<34} {:<8} {:<17} {:<15} {:>7.3f} {:>7.3f} {:>6.{}f} {:>4.0f} ", name_of(of, row),
             semitone::dtype_name(of.dtype), of.shape, counts_of(row),
             1e3 * result.kernel.min_seconds, 1e3 * result.kernel.median_seconds,
             result.rate() / 1e9, row.is_product() ? 0 : 1, 100 * result.share());
  if (result.libtorch.has_value()) {
    fmt::print("{:>8.3f} {:>5.2f}\n", 1e3 * result.libtorch->min_seconds, result.ratio());
  } else {
    fmt::print("{:>8} {:>5}\n", "-", "-");
  }
  std::fflush(stdout);
}

ordered_json json_of(const Timing& timing) {
  return {{"min_seconds", timing.min_seconds}, {"median_seconds", timing.median_seconds}};
}

ordered_json json_of(const Case& of, const Row& row, const Result& result) {
  ordered_json counts = ordered_json::object();
  for (const auto& moved : row.moved) counts[moved.name] = moved.bytes;
  ordered_json baseline = json_of(result.baseline);
  baseline["name"] = result.baseline.name;
  baseline["work"] = result.baseline_work;
  return {{"kernel", of.kernel},
          {"pass", row.pass},
          {"dtype", semitone::dtype_name(of.dtype)},
          {"shape", of.shape},
          {"unit", row.is_product() ? "operations" : "bytes"},
          {"work", result.work},
          {"counts", counts},
          {"semitone", json_of(result.kernel)},
          {"libtorch", result.libtorch.has_value() ? json_of(*result.libtorch) : nullptr},
          {"baseline", baseline},
          {"per_second", result.rate()},
          {"share_of_baseline", result.share()},
          {"ratio", result.libtorch.has_value() ? ordered_json(result.ratio()) : nullptr}};
}

std::vector<Case> cases_of(const Flags& flags, const Sizes& sizes) {
  std::vector<Case> all;
  if (sizes.device.is_cpu()) bench::add_casts(all, sizes);
  bench::add_gradients_and_steps(all, sizes);
  bench::add_layerwise_steps(all, sizes);
  bench::add_norms(all, sizes);
  bench::add_pointwise(all, sizes);
  bench::add_losses(all, sizes);
  bench::add_attention(all, sizes);
  if (sizes.device.is_cpu()) bench::add_products(all, sizes);
  if (flags.only.empty()) return all;
  const std::regex only(flags.only, std::regex::ECMAScript | std::regex::icase);
  std::erase_if(all, [&](const Case& of) {
    const auto name = fmt::format("{} {} {}", of.kernel, semitone::dtype_name(of.dtype), of.shape);
    return !std::regex_search(name, only);
  });
  if (all.empty()) {
    throw semitone::Error(kComponent, "--only to match a kernel, its dtype and shape",
                          "'" + flags.only + "'", "run without --only to see them");
  }
  return all;
}

// Otherwise glibc would return large blocks to the system after each call, and the next call would
// take a page fault for every page: up to half of the time of a kernel that writes 50 MB.
void keep_memory() {
#ifdef __GLIBC__
  constexpr int kNever = 2'000'000'000;
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, kNever);
#endif
}

Sizes sizes_of(const Flags& flags) {
  const at::Device device(flags.device);
  if (device.is_cuda() && !torch::cuda::is_available()) {
    throw semitone::Error(kComponent, "a CUDA device for --device " + flags.device,
                          semitone::describe_device(at::kCPU), "give --device cpu");
  }
  Sizes sizes = device.is_cpu() ? Sizes::full() : Sizes::of_gpu(device);
  if (flags.small) sizes = Sizes::small();
  sizes.device = device;
  return sizes;
}

void run(const Flags& flags) {
  if (!flags.json.empty()) semitone::require_writable(flags.json, kComponent);
  keep_memory();
  torch::manual_seed(0);
  const Sizes sizes = sizes_of(flags);
  const auto device = semitone::describe_device(sizes.device.type());
  const std::vector<Case> cases = cases_of(flags, sizes);
  fmt::print("{}; LibTorch {}; {} threads; least and median of {} rounds{}\n", device,
             semitone::libtorch_version(), at::get_num_threads(), flags.rounds,
             flags.small ? "; small sizes: figures mean nothing" : "");
  Baselines baselines(sizes);
  std::map<std::string, double> fastest;  // of the baselines, by name
  ordered_json rows = ordered_json::array();
  std::optional<bool> section;  // whether the last row was a product
  for (const Case& of : cases) {
    std::vector<Row> made;
    try {
      made = of.make();
    } catch (const semitone::Error& error) {
      throw semitone::Error(
          kComponent,
          fmt::format("a right {} of {} {}", of.kernel, semitone::dtype_name(of.dtype), of.shape),
          error.what());
    }
    for (const Row& row : made) {
      const Result result = measure(row, baselines.of(row, of.dtype), flags.rounds, sizes.device);
      if (section != row.is_product()) print_head(row.is_product());
      section = row.is_product();
      print(of, row, result);
      rows.push_back(json_of(of, row, result));
      const auto unit = row.is_product() ? semitone::dtype_name(of.dtype) + ", GFLOP/s" : "GB/s";
      double& best = fastest[result.baseline.name + ", " + unit];
      best = std::max(best, result.baseline_rate());
    }
  }
  fmt::print("\n100 %, at its best:\n");
  for (const auto& [name, rate] : fastest) fmt::print("{:<42} {:>8.1f}\n", name, rate / 1e9);
  if (flags.json.empty()) return;
  const ordered_json all{{"device", device},
                         {"threads", at::get_num_threads()},
                         {"rounds", flags.rounds},
                         {"small", flags.small},
                         {"versions",
                          {{"semitone", semitone::version()},
                           {"libtorch", semitone::libtorch_version()},
                           {"compiler", semitone::compiler()}}},
                         {"rows", rows}};
  semitone::write_file(flags.json, all.dump(2) + "\n", kComponent);
}

// Empty if the text is a valid regular expression.
std::string complaint_of(const std::string& text) {
  try {
    static_cast<void>(std::regex(text));
    return {};
  } catch (const std::regex_error& error) {
    return fmt::format("'{}' is no regular expression: {}", text, error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Times each kernel that training uses, after proving it right.", "kernels_bench");
  app.add_option("--rounds", flags.rounds, "turns that each contender has")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--only", flags.only,
                 "only those whose name, dtype and shape match, as in 'norm.*bfloat16'")
      ->check(complaint_of);
  app.add_option("--json", flags.json, "where the figures go as well");
  app.add_flag("--small", flags.small, "small sizes, to try out whether all is right");
  app.add_option("--device", flags.device, "cpu, cuda or cuda:N")->capture_default_str();
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
