#include "apps/semitone/train_flags.h"

#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/env.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>

namespace semitone::cli {
namespace {

constexpr std::int64_t kTrainMost = 1'000'000'000;

// What says how many processes train, and where; not meant for those processes.
constexpr std::array kJobFlags{"--nproc", "--nodes", "--node-rank", "--master-addr",
                               "--master-port"};

constexpr auto kTrainFooter =
    R"(The data are four IDX files as MNIST has them (train-images-idx3-ubyte, train-labels-idx1-ubyte,
t10k-…), plain or .gz: any number of images of 28 x 28, labels 0 to 9.
In the table, ms/step is the median step's and speed O0's ms/step over it; images/s is over all steps, time
that of the whole training without the test. A MB is 2^20 bytes; tensors is the most memory that the tensors of
training took, RSS that of the whole process.
Threads that wait for each other spin: on a machine that is busy with other programs, --threads 1 or
GOMP_SPINCOUNT=10000 can be several times faster.

Examples:
  semitone train --opt-level all                       the four levels, each in a process of its own
  semitone train --opt-level O2 --dtype fp16 --json o2.json
  semitone train --data ~/fashion-mnist --epochs 5
  semitone train --opt-level O1 --lr 1e-4 --momentum 0 --schedule constant --epochs 2   the tutorials' setting
  semitone train --max-steps 300 --save half.ckpt && semitone train --resume half.ckpt
  semitone train --save c.ckpt --resume c.ckpt --save-every 100   starts, and goes on when it is started again
  semitone train --opt-level O2 --nproc 2 --sync-bn     two processes, each with its share of the images
  semitone train -n 2 -g 4 -nr 0 --master-addr node0    the same on node 0 of 2, with 4 processes on each

)";

}  // namespace

std::shared_ptr<const TrainFlags> add_train_flags(CLI::App& command) {
  const auto flags = std::make_shared<TrainFlags>();
  flags->data = env::get(env::kDataDir).value_or(SEMITONE_DEFAULT_DATA_DIR);
  Flags add(command, kTrain);
  add.choice("--model", flags->model, {"convnet"}, "What to train");
  add.text("--data", flags->data, "DIR", "Where the data lie");
  add.choice(
      "--opt-level", flags->opt_level, {"O0", "O1", "O2", "O3", "all"},
      "fp32, autocast, 16-bit weights with fp32 masters, all 16 bits; or the four one by one");
  add.choice("--dtype", flags->dtype, {"auto", "bf16", "fp16"},
             "Which 16-bit format to take; auto: bf16 on a CPU");
  add.integer("--epochs", flags->epochs, 1, 1'000'000, "How often every image is seen");
  add.integer("--batch-size", flags->batch_size, 1, 1'000'000, "Images a step, of each process");
  add.choice("--optimizer", flags->optimizer, {"sgd", "adam", "adamw"}, "What updates the weights");
  const auto positive = [](double value) {
    return value > 0 && value <= dtype_limits(torch::kFloat).max;
  };
  add.number("--lr", flags->lr, positive, "above 0 that float32 holds",
             "Learning rate, the highest of the schedule");
  add.number(
      "--momentum", flags->momentum, [](double value) { return value >= 0 && value < 1; },
      "from 0 to below 1", "Momentum of sgd");
  add.choice("--schedule", flags->schedule, {"constant", "cosine"},
             "How the learning rate moves; cosine: up over a quarter of the steps, then down to 0");
  add.number_or_word("--loss-scale", flags->loss_scale, {"auto", "dynamic"},
                     "dynamic or a number; auto: dynamic for fp16 at O1 and O2, else 1");
  add.integer("--growth-interval", flags->growth_interval, 0, kTrainMost,
              "Good steps after which a dynamic loss scale doubles; 0: never");
  add.integer("--seed", flags->seed, 0, kTrainMost,
              "Number that the first weights and the order of the images are drawn from");
  add.integer("--threads", flags->threads, 0, 1024,
              "Threads of a process, at most as many as there are cores; 0: as LibTorch chooses");
  add.choice("--memory-format", flags->memory_format, {"auto", "nchw", "nhwc"},
             "How images lie in memory; auto: nhwc, which is faster at every level");
  add.integer("--limit-batches", flags->limit_batches, 0, kTrainMost,
              "Batches an epoch at most; 0: all");
  add.integer("--max-steps", flags->max_steps, 0, kTrainMost,
              "Stop after this step, counted from the very first; 0: at the end");
  add.text(
      "-g,--nproc,--gpus", flags->nproc, "N|auto|cpu|gpu",
      "Processes that train together, on each node: a number, or one for each core or GPU. Also "
      "with semitone launch, torchrun --no-python, srun or mpirun before this command");
  add.integer("-n,--nodes", flags->nodes, 1, 1 << 16, "Machines that train together");
  add.integer("--node-rank,--nr", flags->node_rank, 0, 1 << 16,
              "Number of this machine, from 0; also -nr");
  add.text("--master-addr", flags->master_addr, "ADDR",
           "Address of machine 0; default: $MASTER_ADDR for several machines, this one for one");
  add.integer(
      "--master-port", flags->master_port, 0, 65535,
      "Where the processes meet; 0: a free port for one machine, else $MASTER_PORT or 29500");
  add.mark("--sync-bn", flags->sync_bn,
           "Take BatchNorm's statistics over the batches of all processes together, not of each");
  add.choice("--compress", flags->compress, {"none", "bf16", "fp16"},
             "Send fp32 gradients between processes in this format");
  add.text("--save", flags->save, "FILE",
           "Write the state at the end, to resume from; at SIGTERM or SIGUSR1, too, which end the "
           "training then");
  add.integer("--save-every", flags->save_every, 0, kTrainMost,
              "Write it after so many steps each time, too; 0: do not");
  add.text("--resume", flags->resume, "FILE",
           "Go on from a saved state, bit for bit as if there had been no break. The file of "
           "--save: start anew if it is not there yet");
  add.integer("--log-every", flags->log_every, 0, kTrainMost,
              "Steps from one line of progress to the next where the output is no terminal; 0: "
              "none");
  add.json(flags->json);
  command.add_flag("--quiet", flags->quiet, "No progress, only the table");
  command.add_flag("--as-part", flags->as_part)->group("");
  command.footer(std::string(kTrainFooter) + kExitCodesHelp);
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
  if (flags.optimizer != "sgd" && command.count("--momentum") > 0)
    throw UsageError(kTrain, "--momentum with --optimizer sgd only",
                     "--optimizer " + flags.optimizer);
  std::error_code ignored;
  if (!flags.save.empty() && !flags.json.empty() &&
      std::filesystem::weakly_canonical(flags.save, ignored) ==
          std::filesystem::weakly_canonical(flags.json, ignored))
    throw UsageError(kTrain, "two files for --save and --json", "'" + flags.save + "' for both");
  if (flags.save_every > 0 && flags.save.empty())
    throw UsageError(kTrain, "--save with --save-every", "none", "say where the state goes");
  for (const char* const flag : {"--save", "--resume"}) {
    if (flags.levels().size() > 1 && command.count(flag) > 0)
      throw UsageError(kTrain, std::string("one level with ") + flag, "--opt-level all");
  }
  for (const char* const flag : kJobFlags) {
    if (place.world_size > 1 && command.count(flag) > 0) {
      throw UsageError(kTrain, std::string("no ") + flag + " in a process that was launched",
                       fmt::format("{} as rank {} of {}", flag, place.rank, place.world_size),
                       "give the number of processes to the launcher, or leave the launcher out");
    }
  }
  try {
    if (flags.starts_job()) job_of(flags).check();
  } catch (const Error& error) {
    throw UsageError(error);
  }
}

train::TrainOptions options_of(const TrainFlags& flags, amp::OptLevel level,
                               const comm::Group& group) {
  train::TrainOptions options;
  options.opt_level(level)
      .device(default_device())
      .epochs(flags.epochs)
      .batch_size(flags.batch_size)
      .optimizer(train::parse_optimizer(flags.optimizer))
      .lr(flags.lr)
      .momentum(flags.momentum)
      .schedule(train::parse_schedule(flags.schedule))
      .growth_interval(flags.growth_interval)
      .seed(static_cast<std::uint64_t>(flags.seed))
      .memory_format(train::parse_memory_format(flags.memory_format))
      .limit_batches(flags.limit_batches)
      .max_steps(flags.max_steps)
      .group(group)
      .sync_batch_norm(flags.sync_bn)
      .save(flags.save)
      .save_every(flags.save_every)
      .resume(flags.resume);
  if (flags.dtype != "auto") options.dtype(parse_dtype(flags.dtype));
  if (flags.loss_scale != "auto") options.loss_scale(amp::LossScale(flags.loss_scale));
  if (flags.compress != "none")
    options.ddp(parallel::DdpOptions().compress(parse_dtype(flags.compress)));
  return options;
}

launch::LaunchOptions job_of(const TrainFlags& flags) {
  const auto nodes = static_cast<int>(flags.nodes);
  launch::LaunchOptions options(std::filesystem::read_symlink("/proc/self/exe"));
  options.nproc_per_node(flags.processes())
      .nnodes({nodes, nodes})
      .node_rank(static_cast<int>(flags.node_rank));
  set_master(options, flags.master_addr, flags.master_port, kTrain);
  return options;
}

std::vector<std::string> arguments_for(const CLI::App& command, amp::OptLevel level,
                                       const std::string& json) {
  std::vector<std::string> arguments{command.get_name()};
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || name == "--opt-level" || name == "--json" ||
        std::find(kJobFlags.begin(), kJobFlags.end(), name) != kJobFlags.end())
      continue;
    arguments.push_back(name);
    // A flag without a value has a "true" for one.
    if (option->get_items_expected_max() > 0) arguments.push_back(option->results().front());
  }
  arguments.insert(arguments.end(),
                   {"--as-part", "--opt-level", std::string(amp::name_of(level)), "--json", json});
  return arguments;
}

}  // namespace semitone::cli
