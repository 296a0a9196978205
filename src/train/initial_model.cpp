#include "src/train/initial_model.h"

#include "semitone/parallel/sync_batch_norm.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <cstdint>
#include <limits>

namespace semitone::train {

c10::Device device_of(const TrainOptions& options) {
  const c10::Device given = options.group().device();
  return given.type() == options.device().type() ? given : options.device();
}

Classifier make_seeded(const ModelFactory& make_model, const TrainOptions& options) {
  torch::manual_seed(static_cast<std::uint64_t>(options.seed()));
  Classifier model = make_model();
  model.module()->to(device_of(options));
  if (options.sync_batch_norm()) {
    parallel::convert_sync_batchnorm(*model.module(), options.group());
  }
  return model;
}

void reseed(const comm::Group& group) {
  if (group.rank() == 0) return;
  const auto next =
      torch::randint(std::numeric_limits<std::int64_t>::max(), {group.rank()}, torch::kLong);
  torch::manual_seed(static_cast<std::uint64_t>(next[-1].item<std::int64_t>()));
}

}  // namespace semitone::train
