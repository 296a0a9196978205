#include "apps/semitone/short_training.h"

#include "src/train/device.h"
#include "src/train/models.h"
#include "src/train/optimizers.h"

namespace semitone::cli {

void ShortTraining::prepare(amp::OptLevel level) {
  set_threads(threads, "cli");
  options.device(train::find_device(device)).opt_level(level);
}

void check_momentum(const CLI::App& command, const train::TrainOptions& options,
                    std::string_view component) {
  if (command.count("--momentum") == 0 || train::find_optimizer(options.optimizer()).has_momentum)
    return;
  throw UsageError(component, "--momentum with --optimizer sgd or fused-sgd only",
                   "--optimizer " + options.optimizer());
}

void add_short_training_flags(Flags& add, ShortTraining& training) {
  add.choice("--model", training.model, names_of(train::models()), "Model to train");
  add_data_flags(add, training.data);
  train::add_training_flags(add, training.options);
  train::add_device_flag(add, training.device);
  add.integer("--threads", training.threads, 0, 1024,
              "Threads, at most the number of cores; 0: LibTorch's choice");
  add.json(training.json);
}

}  // namespace semitone::cli
