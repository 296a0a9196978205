#include "src/train/checks.h"

#include "semitone/core/error.h"
#include "src/core/dtype_limits.h"
#include "src/train/on_spike.h"
#include "src/train/setup.h"
#include "src/weights/file_names.h"

#include <torch/types.h>

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace semitone::train {
namespace {

constexpr auto kChecks = "train.trainer";

void check_checkpoint_options(const TrainOptions& options) {
  const SaveInterval& every = options.save_every();
  const auto require = [](bool good, std::string_view expected, const std::string& got) {
    if (!good) throw Error(kChecks, expected, got);
  };
  require(
      every.steps >= 0 && every.time.count() >= 0 && !(every.steps > 0 && every.time.count() > 0),
      "a number of steps between saves, or a time",
      fmt::format("{} steps and {} s", every.steps, every.time.count()));
  require(options.keep() >= 0, "to keep 0 (all) checkpoints or more",
          std::to_string(options.keep()));
  const bool has_directory = !options.checkpoint_dir().empty();
  require(has_directory || !every.is_set(), "a checkpoint_dir with save_every", "none");
  require(has_directory || !options.resume_auto(), "a checkpoint_dir with resume_auto", "none");
  require(!options.resume_auto() || options.resume_from().empty(), "resume_auto or resume_from",
          "both");
  require(options.save_weights().empty() || weights::format_of_name(options.save_weights()),
          std::string("save_weights that ends in ") + weights::kFileNames,
          "'" + options.save_weights().string() + "'");
}

void check_spike_options(const TrainOptions& options) {
  if (options.on_spike() == OnSpike::none) return;
  const auto require = [&](bool good, std::string_view expected, std::string_view got) {
    const std::string_view action = name_of(options.on_spike());
    if (!good) throw Error(kChecks, fmt::format("{} with on_spike {}", expected, action), got);
  };
  require(has_spike_limit(options), "a max_loss_ratio or max_z_score in divergence_guard", "none");
  if (options.on_spike() == OnSpike::lower_scale)
    require(has_dynamic_scale(options), "a dynamic loss scale", "a constant one");
  if (options.on_spike() == OnSpike::rollback) {
    require(!options.checkpoint_dir().empty(), "a checkpoint_dir", "none");
    require(options.save_every().is_set(), "save_every", "none");
  }
}

}  // namespace

void check_options(const TrainOptions& options, const DataKind& kind) {
  if (options.augment() && !kind.can_augment) {
    throw Error(kChecks, "data that can be augmented", kind.examples, "leave out --augment");
  }
  const auto require = [](bool good, const char* expected, double got) {
    if (!good) throw Error(kChecks, expected, fmt::format("{}", got));
  };
  const auto count = [](std::int64_t value) { return static_cast<double>(value); };
  require(options.epochs() > 0, "epochs above 0", count(options.epochs()));
  require(options.batch_size() > 0, "a batch size above 0", count(options.batch_size()));
  require(options.lr() > 0 && options.lr() <= dtype_limits(torch::kFloat).max,
          "a learning rate above 0 that float32 holds", options.lr());
  if (precision_of(options).has_fp16_weights_only()) {
    require(options.lr() <= dtype_limits(torch::kHalf).max,
            "a learning rate of at most 65504 with float16 weights", options.lr());
  }
  find_optimizer(options.optimizer());
  require(options.momentum() >= 0 && options.momentum() < 1, "a momentum in [0, 1)",
          options.momentum());
  require(options.growth_interval() >= 0, "a growth interval of 0 (never) or more",
          count(options.growth_interval()));
  require(options.max_consecutive_skips() >= 0, "a limit of consecutive skips of 0 (none) or more",
          count(options.max_consecutive_skips()));
  require(options.limit_batches() >= 0, "a batch limit of 0 (none) or more",
          count(options.limit_batches()));
  require(options.max_steps() >= 0, "a step limit of 0 (none) or more", count(options.max_steps()));
  precision_of(options).check(kChecks);
  check_checkpoint_options(options);
  check_spike_options(options);
}

}  // namespace semitone::train
