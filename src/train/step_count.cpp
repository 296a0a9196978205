#include "src/train/step_count.h"

#include "semitone/core/error.h"
#include "src/core/counted.h"
#include "src/train/checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

namespace semitone::train {
namespace {

// How each batch gets enough examples.
std::string remedy_for(const StepCount& count, std::int64_t smallest, const TrainOptions& options,
                       const DataKind& kind) {
  const bool has_ranks = options.group().size() > 1;
  if (count.examples < smallest) {
    return fmt::format("train on more {}{}", kind.examples,
                       has_ranks ? ", or with fewer processes" : "");
  }
  const char* const flags = has_ranks ? "--batch-size or --global-batch-size" : "--batch-size";
  if (options.batch_size() < smallest) return fmt::format("raise {}", flags);
  std::string other = fmt::format("use another {}", flags);
  if (count.batches == 1) return other;
  return fmt::format("{}, or leave that batch out with --limit-batches {}", other,
                     count.batches - 1);
}

}  // namespace

StepCount count_steps(const DataSet& data, const TrainOptions& options) {
  const std::int64_t ranks = options.group().size();
  const std::int64_t batch_size = options.batch_size();
  StepCount count;
  count.examples = (data.train->size() + ranks - 1) / ranks;
  count.all_batches = (count.examples + batch_size - 1) / batch_size;
  count.last_batch = count.examples - (count.all_batches - 1) * batch_size;
  count.batches = options.limit_batches() > 0 ? std::min(count.all_batches, options.limit_batches())
                                              : count.all_batches;
  count.steps = count.batches * options.epochs();
  count.end = options.max_steps() > 0 ? std::min(options.max_steps(), count.steps) : count.steps;
  return count;
}

void require_steps(const DataSet& data, const TrainOptions& options, std::int64_t least,
                   std::string_view component) {
  check_options(options, data.kind);
  const StepCount count = count_steps(data, options);
  if (count.end >= least) return;
  const std::string expected = fmt::format("at least {} steps", least);
  if (count.end < count.steps)
    throw Error(component, expected, fmt::format("{}", count.end), "raise --max-steps");
  throw Error(
      component, expected,
      fmt::format("{} in {} of {}", counted(count.steps, "step"),
                  counted(options.epochs(), "epoch"), counted(count.batches, "batch", "es")),
      count.batches < count.all_batches ? "raise --epochs or --limit-batches"
                                        : "raise --epochs, or lower --batch-size");
}

void require_batches(const StepCount& count, std::int64_t done, std::int64_t smallest,
                     const TrainOptions& options, const DataKind& kind) {
  if (done >= count.end) return;
  // Every batch is full, except the last one of an epoch.
  const bool ends_epoch = count.end / count.batches > done / count.batches;
  const bool has_last_batch = ends_epoch && count.batches == count.all_batches;
  const std::int64_t size = has_last_batch ? count.last_batch : options.batch_size();
  if (size >= smallest) return;
  const bool is_only_size = count.examples < smallest || options.batch_size() < smallest;
  throw Error("train.trainer",
              fmt::format("batches of at least {} {}{} for the model's BatchNorm layers", smallest,
                          kind.examples, options.group().size() > 1 ? " per process" : ""),
              is_only_size ? fmt::format("{}", size)
                           : fmt::format("{} in batches of {}, of which the last has {}",
                                         count.examples, options.batch_size(), size),
              remedy_for(count, smallest, options, kind));
}

}  // namespace semitone::train
