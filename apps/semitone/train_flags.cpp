#include "apps/semitone/train_flags.h"

#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/output.h"
#include "apps/semitone/policy_flag.h"
#include "apps/semitone/short_training.h"
#include "apps/semitone/train_record.h"
#include "semitone/core/dtype.h"
#include "src/core/dtype_limits.h"
#include "src/core/log.h"
#include "src/launch/process_count.h"
#include "src/report/run_json.h"
#include "src/train/models.h"
#include "src/weights/file_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <system_error>

namespace semitone::cli {
namespace {

// Flags for the number and places of the processes; they are not passed on to these processes.
constexpr std::array kJobFlags{"--nproc",       "--nodes",       "--node-rank",
                               "--master-addr", "--master-port", "--grace"};

constexpr auto kDataFooter =
    R"(The data set of --data is recognised by its files, plain or .gz: four IDX files with MNIST's names
(train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-…), with any number of images of 28 x 28 and labels from 0 to 9;
CIFAR-10's binary files (data_batch_1.bin to data_batch_5.bin, test_batch.bin); or CIFAR-100's (train.bin, test.bin; the
fine labels). A folder of PNG, JPEG, PPM or PGM images has a sub-folder for each class, in train/ and test/ (or val/), or
without these for --test-share; images of several sizes need --image-size. Other formats must be converted, with
ImageMagick's mogrify -format png for example. The images of each split of a folder are read into memory, at most
--max-data GiB, and so is a text. A GiB is 2^30 bytes.
The model has the channels, size and classes of the images. A ResNet sees a single channel three times, and images below
32 x 32 in a frame of zeros. For images up to 32 x 32, it needs at least 2 in each batch. vit has 6 layers of width 192
with 3 heads and a feed-forward width of 768, and at most 14 x 14 patches (of 4 x 4 for MNIST and CIFAR, 16 x 16 for 224
x 224); it is usually trained with --optimizer adamw and a small rate, such as --lr 0.001.

gpt learns the text in a file, plain or .gz, in UTF-8 or another encoding without zero bytes. It predicts each character
(one byte) from those before it, up to --sequence-length. It has the layers of Llama, 4 of width 256 with 4 heads, 3.2 million parameters. The
last --test-share of the text is held out. Test loss is its mean cross entropy in nats per character, and perplexity is
exp(test loss): 1 if each character is predicted with certainty, the number of different characters for a uniform guess.
)";

constexpr auto kTrainFooter =
    R"(In the table, ms/step is the median, speed is O0's ms/step divided by it, images/s and characters/s are averages over
all steps, loss is the mean of the last epoch's steps, and time is the duration of the training without the test. A MB is
2^20 bytes; tensors is the peak memory of the training's tensors, and RSS that of the whole process.
Waiting threads spin. If other programs use the machine, --threads 1 or GOMP_SPINCOUNT=10000 can be several times
faster.

With --checkpoint-dir, SIGTERM, SIGUSR1 and SIGHUP preempt the training: it finishes the step, saves a checkpoint and
returns 128 + the signal's number (143, 138 or 129). The same command with --resume auto then continues. One process of
several suffices: all stop at the same step, after 0.1 s or a step, whichever takes longer. Further such signals have no
effect. Ctrl-C and SIGKILL end the program at once, and the earlier checkpoints stay good.

A loss above --max-loss-ratio times the running mean is a spike. --on-spike skip suits bad batches: they are left out
before the backward pass, also those whose loss is inf or NaN. --on-spike rollback suits trainings that leave their good
weights: it loads the newest checkpoint after 5 spikes in a row, a NaN loss or too many skipped steps, and goes on with
the next batch, not with those since the checkpoint. A loss that stays high ends the training with code 3 in any case.

Examples:
  semitone train --opt-level all                       the four levels, each in its own process
  semitone train --opt-level O2 --dtype fp16 --json o2.json
  semitone train --data ~/fashion-mnist --epochs 5
  semitone train --data ~/cifar-10-batches-bin --model resnet18 --epochs 10 --augment
  semitone train --data ~/flowers --image-size 64 --model resnet18     with flowers/daisy/1.png, flowers/tulip/1.png, …
  semitone train --model gpt --data novel.txt --sequence-length 256
  semitone train --opt-level O1 --lr 1e-4 --momentum 0 --schedule constant --epochs 2   the setting of the tutorials
  semitone train --checkpoint-dir runs/7 --save-every 5min --resume auto   starts, and resumes when it is run again
  semitone train --max-loss-ratio 3 --on-spike skip     leaves out batches with a loss above 3 times the running mean
  semitone train --log-dir runs/7 --print-config > run.toml; semitone train --config run.toml
  semitone train --resume runs/7/step-00000300 --save-weights convnet.safetensors
  semitone train --opt-level O2 --nproc 2 --sync-bn     two processes, each with its share of the images
  semitone train -n 2 -g 4 -nr 0 --master-addr node0    on node 0 of 2, with 4 processes on each

)";

// What is trained, and how.
void add_training_flags(Flags& add, TrainFlags& flags) {
  add.choice("--model", flags.model, names_of(train::models()), "Model to train");
  add_data_flags(add, flags.data);
  add.choice("--opt-level", flags.opt_level, {"O0", "O1", "O2", "O3", "all"},
             "O0: fp32; O1: autocast; O2: 16-bit weights with fp32 masters; O3: all 16 bits; all: "
             "the four in turn");
  add.text(
      "--policy", flags.policy, kPolicyType,
      "Cast policy of O1: " + policy_choices() +
          ". At O2 and O3 it says which parameters stay in fp32, and which products are in fp8");
  add.mark(
      "--fp8", flags.fp8,
      "At O1 to O3, compute linear layers and convolutions in fp8 (e4m3 forward, e5m2 backward, "
      "delayed scaling), emulated on every processor");
  train::add_training_flags(add, flags.options);
  train::add_spike_flags(add, flags.options);
  train::add_device_flag(add, flags.device);
  add.integer("--threads", flags.threads, 0, 1024,
              "Threads per process, at most the number of cores; 0: LibTorch's choice");
}

// The processes that train together.
void add_job_flags(Flags& add, TrainFlags& flags) {
  add.text("-g,--nproc,--gpus", flags.nproc, "N|auto|cpu|gpu",
           "Processes per machine: a number, or one for each core or GPU. Alternatively run this "
           "command under semitone launch, torchrun --no-python, srun or mpirun");
  add.integer("-n,--nodes", flags.nodes, 1, 1 << 16, "Number of machines");
  add.integer("--node-rank,--nr", flags.node_rank, 0, 1 << 16,
              "Index of this machine, from 0; also -nr");
  add.text("--master-addr", flags.master_addr, "ADDR",
           "Address of machine 0; default: $MASTER_ADDR for several machines, this one for one");
  add.integer("--master-port", flags.master_port, 0, 65535,
              "Port of the rendezvous; 0: a free port for one machine, else $MASTER_PORT or 29500");
  add.number(
      "--grace", flags.grace, [](double value) { return std::isfinite(value) && value >= 0; },
      "from 0",
      "Seconds from SIGTERM to SIGKILL when the processes are stopped: with --checkpoint-dir, "
      "each first ends its step and saves");
  add.integer("--global-batch-size", flags.global_batch_size, 0, train::kLargestCount,
              "Images, or sequences, per step of all processes together, divided equally among "
              "them, so that a "
              "run can be resumed with another number of processes; 0: --batch-size for each");
  train::add_group_flags(add, flags.options);
}

// The flags for a file of flags.
void add_config_flags(Flags& add, CLI::App& command, TrainFlags& flags) {
  add.text(
      "--config", flags.config, "FILE",
      "Read flags from a file, a line epochs=3 for each; those of the command line count more");
  add.mark("--print-config", flags.print_config,
           "Print the flags of this command line as a file for --config, and do not train");
  for (const char* const flag : {"--config", "--print-config"})
    command.get_option(flag)->configurable(false);
}

void check_batch_size(const TrainFlags& flags, const CLI::App& command,
                      const comm::Rendezvous& place) {
  if (flags.global_batch_size == 0) return;
  if (command.count("--batch-size") > 0)
    throw UsageError(kTrain, "--batch-size or --global-batch-size", "both");
  // Other machines may have another number of processes, so only these know how many there are.
  if (place.world_size <= 1 && flags.nodes > 1) return;
  const int processes = place.world_size > 1 ? place.world_size : flags.processes();
  if (flags.global_batch_size % processes != 0) {
    throw UsageError(
        kTrain, fmt::format("--global-batch-size that is a multiple of {} processes", processes),
        std::to_string(flags.global_batch_size));
  }
}

// The record is complete before --json is written.
void check_json(const TrainFlags& flags) {
  if (flags.log_dir.empty() || !report::has_name_of_record(flags.json)) return;
  const auto folder = place_of(flags.json).parent_path();
  const auto record = place_of(flags.log_dir);
  // That of several levels has a folder for each.
  if (folder != record && folder.parent_path() != record) return;
  throw UsageError(kTrain, "--json beside the record in --log-dir",
                   "'" + flags.json + "', a file of the record", "choose another name");
}

// The flags for checkpoints and weights.
void check_files(const TrainFlags& flags, const CLI::App& command) {
  check_json(flags);
  const std::filesystem::path& file = flags.options.save_weights();
  require_two_files(kTrain, {"--save-weights", file}, {"--json", flags.json});
  // --policy may be a name, too, and --data a folder.
  for (const FlagOfFile& read :
       {FlagOfFile{"--policy", flags.policy}, FlagOfFile{"--config", flags.config},
        FlagOfFile{"--data", flags.data.path}}) {
    require_two_files(kTrain, read, {"--json", flags.json});
    require_two_files(kTrain, read, {"--save-weights", file});
  }
  if (!file.empty() && !weights::format_of_name(file)) {
    throw UsageError(kTrain, std::string("--save-weights that ends in ") + weights::kFileNames,
                     "'" + file.string() + "'");
  }
  const bool has_directory = !flags.options.checkpoint_dir().empty();
  if (flags.options.resume_auto() && !has_directory)
    throw UsageError(kTrain, "--checkpoint-dir with --resume auto", "none",
                     "name the directory of the checkpoints");
  for (const char* const flag : {"--save-every", "--keep"}) {
    if (command.count(flag) > 0 && !has_directory)
      throw UsageError(kTrain, std::string("--checkpoint-dir with ") + flag, "none",
                       "name the directory of the checkpoints");
  }
  for (const char* const flag : {"--checkpoint-dir", "--resume", "--save-weights"}) {
    if (flags.levels().size() > 1 && command.count(flag) > 0)
      throw UsageError(kTrain, std::string("one level with ") + flag, "--opt-level all");
  }
}

// The flags for spikes of the loss.
void check_spikes(const TrainFlags& flags) {
  using train::OnSpike;
  const OnSpike action = flags.options.on_spike();
  if (action == OnSpike::none) return;
  const auto require = [&](bool good, const char* expected, const std::string& got,
                           const char* remedy) {
    if (good) return;
    throw UsageError(kTrain, fmt::format("{} with --on-spike {}", expected, name_of(action)), got,
                     remedy);
  };
  require(has_spike_limit(flags.options), "--max-loss-ratio", "none",
          "say which losses are spikes, as --max-loss-ratio 3 does");
  if (action == OnSpike::rollback) {
    require(!flags.options.checkpoint_dir().empty(), "--checkpoint-dir", "none",
            "name the directory of the checkpoints");
    require(flags.options.save_every().is_set(), "--save-every", "none",
            "say how often to save a checkpoint");
  }
  if (action != OnSpike::lower_scale) return;
  for (const amp::OptLevel level : flags.levels()) {
    train::TrainOptions options = flags.options;
    options.opt_level(level).device(flags.find_device());
    require(has_dynamic_scale(options), "a dynamic loss scale",
            fmt::format("a constant one at {}", amp::name_of(level)),
            "add --loss-scale dynamic, or choose another action");
  }
}

}  // namespace

std::shared_ptr<const TrainFlags> add_train_flags(CLI::App& command) {
  const auto flags = std::make_shared<TrainFlags>();
  Flags add(command, kTrain);
  add_training_flags(add, *flags);
  add_job_flags(add, *flags);
  train::add_checkpoint_flags(add, flags->options);
  add.integer(
      "--log-every", flags->log_every, 0, train::kLargestCount,
      "Steps between two lines of progress if the output is not a terminal; 0: no such lines");
  add.text(
      "--log-dir", flags->log_dir, "DIR",
      "Record the training in this directory: a table of metrics, a file for TensorBoard, and "
      "settings and versions, for semitone report; --opt-level all: in a directory DIR/O0 … for "
      "each level");
  add.integer(
      "--record-every", flags->record_every, 0, train::kLargestCount,
      "With --log-dir, steps between two samples of the model's values, operators and times, "
      "each of which takes as long as a few steps; 0: none");
  add_config_flags(add, command, *flags);
  add.json(flags->json);
  command.get_option("--json")->configurable(false);
  command.add_flag("--quiet", flags->quiet, "No progress, only the table");
  command.add_flag("--as-part", flags->as_part)->group("")->configurable(false);
  command.footer(kDataFooter + model_defaults_help() + "\n" + kTrainFooter + kExitCodesHelp);
  return flags;
}

std::vector<amp::OptLevel> TrainFlags::levels() const {
  if (opt_level == "all")
    return {amp::OptLevel::O0, amp::OptLevel::O1, amp::OptLevel::O2, amp::OptLevel::O3};
  return {amp::parse_opt_level(opt_level)};
}

int TrainFlags::processes() const {
  return launch::ProcessCount::parse(nproc).count;
}

void check(const TrainFlags& flags, const CLI::App& command, const comm::Rendezvous& place) {
  try {
    flags.processes();
  } catch (const Error& error) {
    throw UsageError(error);
  }
  check_momentum(command, flags.options, kTrain);
  if (train::names_one_gpu(flags.device) && (flags.starts_job() || place.world_size > 1))
    throw UsageError(kTrain, "--device cuda with several processes, each of which uses its own GPU",
                     "--device " + flags.device);
  check_batch_size(flags, command, place);
  check_files(flags, command);
  check_spikes(flags);
  if (command.count("--record-every") > 0 && flags.log_dir.empty())
    throw UsageError(kTrain, "--log-dir with --record-every", "none",
                     "name the directory of the record");
  // The O0 of --opt-level all, which trains in its own process, does without.
  if (flags.opt_level == "O0" && !flags.as_part && (flags.fp8 || !flags.policy.empty())) {
    throw UsageError(
        kTrain,
        fmt::format("--opt-level O1, O2, O3 or all with {}", flags.fp8 ? "--fp8" : "--policy"),
        "O0");
  }
  if (!flags.policy.empty()) policy_of(flags.policy, c10::DeviceType::CPU, kTrain);
  for (const char* const flag : kJobFlags) {
    if (place.world_size > 1 && command.count(flag) > 0) {
      throw UsageError(kTrain, std::string("no ") + flag + " in a process that was launched",
                       fmt::format("{} as rank {} of {}", flag, place.rank, place.world_size),
                       "pass the number of processes to the launcher, or run without a launcher");
    }
  }
  try {
    // "--nproc gpu" is one process on a machine with one GPU.
    const bool has_count = command.count("--nproc") > 0 || command.count("--nodes") > 0;
    for (const char* const flag : {"--node-rank", "--master-addr", "--master-port", "--grace"}) {
      if (!has_count && command.count(flag) > 0)
        throw Error(kTrain, std::string("--nodes or --nproc with ") + flag, "neither",
                    "give the number of machines, the same on each");
    }
    if (has_count) job_of(flags).check();
  } catch (const Error& error) {
    throw UsageError(error);
  }
}

void warn_of_unused_flags(const TrainFlags& flags, const CLI::App& command,
                          const comm::Rendezvous& place) {
  const auto warn = [&](const char* flag, std::string_view reason) {
    if (command.count(flag) > 0) log()->warn("{}: {} has no effect {}", kTrain, flag, reason);
  };
  // Elastic jobs may shrink to one process, and scripts loop over levels: no errors.
  if (!flags.starts_job() && place.world_size <= 1) {
    warn("--sync-bn", "in one process");
    warn("--compress", "in one process");
  }
  if (flags.opt_level == "O0") warn("--dtype", "at --opt-level O0, which trains in fp32");
}

train::TrainOptions options_of(const TrainFlags& flags, amp::OptLevel level,
                               const comm::Group& group) {
  train::TrainOptions options = flags.options;
  options.opt_level(level).device(flags.find_device()).group(group);
  options.batch_size(flags.batch_size(group.size())).fp8(flags.fp8);
  if (level == amp::OptLevel::O0 || flags.policy.empty()) return options;
  const amp::CastTarget target(options.device().type(), train::training_dtype(options));
  options.policy(policy_of(flags.policy, target, kTrain));
  return options;
}

launch::LaunchOptions job_of(const TrainFlags& flags) {
  const auto nodes = static_cast<int>(flags.nodes);
  // Once: a new version may take the file's place between two levels.
  static const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  launch::LaunchOptions options(program);
  options.nproc_per_node(flags.processes())
      .nnodes({nodes, nodes})
      .node_rank(static_cast<int>(flags.node_rank))
      .grace(launch::LaunchOptions::Seconds(flags.grace))
      .rdzv_token(rdzv_token("", kTrain));
  set_master(options, flags.master_addr, flags.master_port, kTrain);
  return options;
}

std::vector<std::string> arguments_for(const CLI::App& command, amp::OptLevel level,
                                       const std::string& json) {
  std::vector<std::string> arguments{command.get_name()};
  const auto& levels = command.get_option("--opt-level")->results();
  const bool is_one_of_all = !levels.empty() && levels.front() == "all";
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || name == "--opt-level" || name == "--json" || name == "--config" ||
        std::find(kJobFlags.begin(), kJobFlags.end(), name) != kJobFlags.end())
      continue;
    if (option->get_items_expected_max() == 0) {
      arguments.push_back(name + (option->as<bool>() ? "=true" : "=false"));
      continue;
    }
    arguments.push_back(name);
    const std::string& value = option->results().front();
    arguments.push_back(name == "--log-dir" ? log_dir_of(value, level, is_one_of_all) : value);
  }
  arguments.insert(arguments.end(),
                   {"--as-part", "--opt-level", std::string(amp::name_of(level)), "--json", json});
  return arguments;
}

}  // namespace semitone::cli
