#include "src/train/run_config.h"

#include "semitone/core/dtype.h"

#include <fmt/format.h>

namespace semitone::train {

RunConfig run_config_of(const TrainOptions& options, MemoryFormat format, const DataSet& data) {
  const auto text = [](const auto& value) { return fmt::format("{}", value); };
  const auto compress = options.ddp().compress();
  RunConfig config{
      {"--loss-scale", options.loss_scale() ? options.loss_scale()->to_string() : "auto"},
      {"--growth-interval", text(options.growth_interval())},
      {fmt::format("{} per step", data.kind.examples),
       text(options.batch_size() * options.group().size())},
      {"--optimizer", options.optimizer()},
      {"--lr", text(options.lr())},
      {"--schedule", std::string(name_of(options.schedule()))},
      {"--seed", text(options.seed())},
      {"--augment", text(options.augment())},
      {"--limit-batches", text(options.limit_batches())},
      {"--memory-format", std::string(name_of(format))},
      {fmt::format("training {}", data.kind.examples), text(data.train->size())},
      {"--sync-bn", text(options.sync_batch_norm())},
      {"--compress", compress ? dtype_name(*compress) : "none"}};
  config.insert(data.settings.begin(), data.settings.end());
  if (find_optimizer(options.optimizer()).has_momentum)
    config["--momentum"] = text(options.momentum());
  const auto& policy = options.policy();
  const bool has_casts = options.opt_level() != amp::OptLevel::O0;
  if (has_casts && policy.has_value()) config["--policy"] = policy->to_json();
  // Only if it adds something to the policy.
  if (has_casts && options.fp8() && !(policy.has_value() && policy->fp8_options().has_value()))
    config["--fp8"] = text(true);
  // A constant rate does not depend on the end, so the end may change.
  if (options.schedule() != Schedule::constant) config["--epochs"] = text(options.epochs());
  // Only a run with checkpoints needs it.
  if (!options.checkpoint_dir().empty() || !options.resume_from().empty())
    config[kDataChecksum] = data.checksum();
  return config;
}

}  // namespace semitone::train
