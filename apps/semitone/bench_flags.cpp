#include "apps/semitone/bench_flags.h"

#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/log.h"
#include "src/core/named_rows.h"
#include "src/train/device.h"
#include "src/train/models.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

namespace semitone::cli {
namespace {

// Width of the feed-forward part for a width of tokens: BERT's.
std::int64_t encoder_ffn(std::int64_t width) {
  return 4 * width;
}

// Llama's: 8/3 of the width, rounded up to a multiple of 256.
std::int64_t decoder_ffn(std::int64_t width) {
  constexpr std::int64_t kMultiple = 256;
  return (8 * width / 3 + kMultiple - 1) / kMultiple * kMultiple;
}

constexpr auto kBenchFooter =
    R"(Before anything is timed, the first losses must match float32's within a tolerance, which is printed (at
O3 the very first one), and the losses must fall.
images/s and tokens/s are those of the median step; a MB is 2^20 bytes.

--floor sums up what the step's matrix products and convolutions take when each runs alone in a loop.
A step cannot be faster with the same kernels for them. Times are minima over --rounds.

With --steps-from-stdin the program prints "ready" after the warm-up, and runs N steps for each line
"step N" on standard input. It answers with a line of JSON that contains the seconds. This lets
benchmarks/compare.py interleave programs that it compares.

Examples:
  semitone bench mnist
  semitone bench resnet50 --opt-level O2 --optimizer torch --json resnet50.json
  semitone bench encoder --layers 1 --width 64 --heads 4 --vocabulary 500 --length 16
  semitone bench decoder --length 1024 --batch-size 2
  semitone bench resnet50 --opt-level O2 --floor
  echo step 10 | semitone bench mnist --steps-from-stdin

)";

// The workloads that train on images, or those on sequences: "mnist or resnet50".
std::string workloads_with(bool images) {
  std::vector<train::WorkloadChoice> result;
  for (const auto& workload : train::workloads()) {
    if (workload.has_images == images) result.push_back(workload);
  }
  return join_names(result, " or ");
}

// Sets the sizes that the command line has.
template <typename Options>
void set_sizes(Options& model, const BenchFlags& flags) {
  if (flags.layers > 0) model.layers(flags.layers);
  if (flags.width > 0) model.width(flags.width);
  if (flags.heads > 0) model.heads(flags.heads);
  if (flags.vocabulary > 0) model.vocabulary(flags.vocabulary);
}

// @param names  with commas between them, or "all", or nothing
void turn_off(amp::CastPolicy& policy, const std::string& names) {
  if (names == "all") {
    policy.fast_kernels(false);
    return;
  }
  std::istringstream rest(names);
  for (std::string name; std::getline(rest, name, ',');) {
    try {
      policy.fast_kernel(name, false);
    } catch (const Error& error) {
      throw UsageError(error);
    }
  }
}

std::string footer() {
  std::string text = "Workloads (--batch-size, sizes and seed can be changed):\n";
  for (const auto& workload : train::workloads())
    text += fmt::format("  {:<8}  {}\n", workload.name, workload.help);
  return text + kBenchFooter + kExitCodesHelp;
}

}  // namespace

std::shared_ptr<const BenchFlags> add_bench_flags(CLI::App& command) {
  const auto flags = std::make_shared<BenchFlags>();
  const train::WorkloadOptions defaults("encoder");
  flags->image_size = defaults.image_size();
  flags->dropout = defaults.encoder().dropout();
  flags->check_steps = defaults.check_steps();
  flags->warm_up = defaults.warm_up();

  Flags add(command, kBench);
  add.argument("workload", flags->workload, names_of(train::workloads()), "Workload to measure");
  add.choice("--opt-level", flags->opt_level, {"O0", "O1", "O2", "O3"},
             "O0: fp32; O1: autocast; O2: 16-bit weights with fp32 masters; O3: all 16 bits");
  add.choice("--dtype", flags->dtype, {"auto", "bf16", "fp16"},
             "16-bit dtype; auto: bf16 on a CPU, else fp16");
  add.choice("--policy", flags->policy, amp::CastPolicy::preset_names(),
             "Cast policy at O1, see semitone ops --policy");
  add.text("--without-kernels", flags->without_kernels, "NAME,...",
           "Turn off these kernels of the cast policy, such as gelu,layer_norm; all: all of them");
  add.choice("--memory-format", flags->memory_format, {"auto", "nchw", "nhwc"},
             "Memory format of images; auto: nhwc");
  train::add_device_flag(add, flags->device);
  add.choice("--optimizer", flags->optimizer, {"fused", "split-masters", "bf16-state", "torch"},
             "fused: Semitone's; split-masters: with split masters; bf16-state: also with bf16 "
             "state; torch: "
             "LibTorch's");
  add.integer("--batch-size", flags->batch_size, 0, kBenchMost,
              "Images or sequences per step; 0: the workload's default");
  add.integer("--image-size", flags->image_size, 32, 4096, "Height and width of resnet50's images");
  add.integer("--length", flags->length, 0, kBenchMost,
              "Tokens per sequence of encoder or decoder; 0: the workload's default");
  add.integer("--layers", flags->layers, 0, 1000,
              "Layers of encoder or decoder; 0: the workload's default");
  add.integer("--width", flags->width, 0, kBenchMost,
              "Size of a token's vector in encoder or decoder; the feed-forward part is 4 times as "
              "wide, or 8/3 times in decoder; 0: the workload's default");
  add.integer("--heads", flags->heads, 0, kBenchMost,
              "Attention heads of encoder or decoder: a divisor of the width; 0: the workload's "
              "default");
  add.integer("--vocabulary", flags->vocabulary, 0, 10 * kBenchMost,
              "Size of the vocabulary of encoder or decoder; 0: the workload's default");
  add.number(
      "--dropout", flags->dropout,
      [](double probability) { return probability >= 0 && probability < 1; }, "from 0 to below 1",
      "Dropout probability of encoder in the measured steps; the check runs without dropout");
  add.mark(
      "--checkpoint-activations", flags->checkpoint_activations,
      "Keep only the inputs of layers and blocks for the backward pass, which runs them again");
  add.integer("--check-steps", flags->check_steps, 2, kBenchMost,
              "Number of losses to compare with float32's");
  add.integer("--warm-up", flags->warm_up, 1, kBenchMost, "Number of steps before timing starts");
  add.integer("--rounds", flags->rounds, 1, kBenchMost, "Number of steps to time");
  add.integer("--seed", flags->seed, 0, 1'000'000'000, "Random seed of weights, data and dropout");
  add.integer("--threads", flags->threads, 0, 1024,
              "Threads of the process, at most the number of cores; 0: LibTorch's choice");
  add.mark("--floor", flags->floor,
           "Also time the step's matrix products and convolutions alone (on a CPU)");
  add.mark("--steps-from-stdin", flags->steps_from_stdin,
           "Run the steps that standard input requests, see below");
  add.json(flags->json);
  command.footer(footer());
  return flags;
}

void check(const BenchFlags& flags, const CLI::App& command) {
  const auto refuse = [&](const char* flag, const std::string& expected, const std::string& got) {
    if (command.count(flag) > 0)
      throw UsageError(kBench, std::string(flag) + " with " + expected + " only", got);
  };
  if (flags.workload != "resnet50") refuse("--image-size", "resnet50", flags.workload);
  if (flags.workload == "mnist")
    refuse("--checkpoint-activations", "resnet50, encoder or decoder", flags.workload);
  if (flags.workload != "encoder") refuse("--dropout", "encoder", flags.workload);
  if (train::find_workload(flags.workload).has_images) {
    for (const char* const flag : {"--length", "--layers", "--width", "--heads", "--vocabulary"})
      refuse(flag, workloads_with(false), flags.workload);
  } else {
    refuse("--memory-format", workloads_with(true), flags.workload);
  }
  if (flags.opt_level != "O1") refuse("--policy", "--opt-level O1", flags.opt_level);
  if (flags.opt_level == "O0") {
    refuse("--without-kernels", "--opt-level O1 to O3", "O0");
    if (command.count("--dtype") > 0)
      log()->warn("{}: --dtype has no effect at --opt-level O0, which computes in fp32", kBench);
  }
  // The last batch norm would have one value per channel.
  if (flags.workload == "resnet50" && flags.image_size <= 32 && flags.batch_size == 1)
    throw UsageError(kBench, "--batch-size from 2 for images of 32 x 32", "1");
  if (flags.floor && train::find_device(flags.device).type() != c10::DeviceType::CPU)
    throw UsageError(kBench, "--floor on a CPU only", "--device " + flags.device);
  if (flags.steps_from_stdin) {
    if (flags.floor) throw UsageError(kBench, "--floor or --steps-from-stdin", "both");
    if (command.count("--rounds") > 0)
      throw UsageError(kBench, "--rounds or --steps-from-stdin", "both");
    if (flags.json == "-") {
      throw UsageError(kBench, "a file for --json with --steps-from-stdin", "standard output",
                       "its answers go there");
    }
  }
}

train::WorkloadOptions options_of(const BenchFlags& flags) {
  train::WorkloadOptions options(flags.workload);
  options.opt_level(amp::parse_opt_level(flags.opt_level))
      .device(train::find_device(flags.device))
      .memory_format(train::parse_memory_format(flags.memory_format))
      .fused_optimizer(flags.optimizer != "torch")
      .split_masters(flags.optimizer == "split-masters" || flags.optimizer == "bf16-state")
      .bf16_state(flags.optimizer == "bf16-state")
      .image_size(flags.image_size)
      .checkpoint_activations(flags.checkpoint_activations)
      .seed(static_cast<std::uint64_t>(flags.seed))
      .check_steps(flags.check_steps)
      .warm_up(flags.warm_up);
  if (flags.length > 0) options.length(flags.length);
  zoo::EncoderOptions& encoder = options.encoder();
  set_sizes(encoder, flags);
  encoder.ffn(encoder_ffn(encoder.width()))
      .dropout(flags.dropout)
      .max_positions(std::max(encoder.max_positions(), options.length()));
  zoo::DecoderOptions& decoder = options.decoder();
  set_sizes(decoder, flags);
  decoder.ffn(decoder_ffn(decoder.width()));
  if (flags.batch_size > 0) options.batch_size(flags.batch_size);
  if (flags.dtype != "auto") options.dtype(parse_dtype(flags.dtype));
  if (flags.policy != "semitone" || !flags.without_kernels.empty()) {
    const auto dtype = options.dtype().value_or(default_16bit_dtype(options.device().type()));
    auto policy = amp::CastPolicy::by_name(flags.policy, {options.device().type(), dtype});
    turn_off(policy, flags.without_kernels);
    options.policy(policy);
  }
  return options;
}

}  // namespace semitone::cli
