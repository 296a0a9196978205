// The rule by which a GradScaler changes its scale: the rules of other systems, its options before
// and during the training, and its state in a file.
#include <semitone/amp.h>

#include <torch/torch.h>

#include <iostream>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace amp = semitone::amp;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// The scale after steps of which one in eight overflows.
double scale_after(amp::GradScaler& scaler, int steps) {
  const auto weight = torch::ones({4}, torch::requires_grad());
  torch::optim::SGD optimizer({weight}, 0.01);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const double factor = step % 8 == 7 ? infinity : 1;
    scaler.scale((weight * factor).sum()).backward();
    scaler.step(optimizer);
    scaler.update();
  }
  return scaler.get_scale();
}

}  // namespace

int main() try {
  const std::vector<std::pair<std::string, amp::LossScaleOptions>> rules = {
      {"default", amp::LossScaleOptions()},
      {"torch.amp.GradScaler", amp::LossScaleOptions::torch()},
      {"Apex, dynamic", amp::LossScaleOptions::apex()},
      {"Apex, fp16_utils.DynamicLossScaler", amp::LossScaleOptions::apex()
                                                 .init_scale(0x1p32)
                                                 .growth_interval(1000)
                                                 .min_scale(1)
                                                 .max_scale(infinity)},
      {"Paddle, static programs", amp::LossScaleOptions::paddle()},
      {"Paddle, paddle.amp.GradScaler",
       amp::LossScaleOptions::paddle().min_scale(0).max_scale(infinity)},
      {"Paddle, AmpScaler", amp::LossScaleOptions::paddle()
                                .init_scale(0x1p15)
                                .growth_interval(1000)
                                .min_scale(0)
                                .max_scale(infinity)},
      {"DeepSpeed", amp::LossScaleOptions::deepspeed()},
      {"constant", amp::LossScaleOptions::fixed(128)},
      {"constant, as an option", amp::LossScaleOptions().init_scale(128).dynamic(false)},
      {"all options", amp::LossScaleOptions()
                          .init_scale(4096)
                          .growth_factor(4)
                          .backoff_factor(0.25)
                          .growth_interval(5)
                          .hysteresis(2)
                          .max_consecutive_skips(50)},
  };
  for (const auto& [name, options] : rules) {
    amp::GradScaler scaler(options);
    const double after = scale_after(scaler, 32);
    std::cout << name << ": " << options.init_scale() << " -> " << after << ", skipped "
              << scaler.scaler().skipped_steps() << '\n';
  }

  // During the training.
  amp::GradScaler scaler(amp::LossScaleOptions().init_scale(1024));
  const auto scaled = scaler.scale({torch::ones({}), 2 * torch::ones({})});  // several losses
  scaler.update(2048);
  scaler.set_options(
      amp::LossScaleOptions().growth_factor(4).backoff_factor(0.25).growth_interval(7));
  const auto& options = scaler.scaler().options();
  std::cout << "scale " << scaler.get_scale() << ", growth " << options.growth_factor()
            << ", backoff " << options.backoff_factor() << ", interval "
            << options.growth_interval() << '\n';
  bool right = scaler.is_enabled() && scaled[1].item<double>() == 2048 &&
               scale_after(scaler, 15) == 2048. * 4 / 4 * 4;

  // In a file, or in a checkpoint: checkpoint.add("scaler", scaler).
  std::stringstream file;
  torch::serialize::OutputArchive saved;
  scaler.save(saved);
  saved.save_to(file);
  amp::GradScaler resumed;
  torch::serialize::InputArchive loaded;
  loaded.load_from(file);
  resumed.load(loaded);
  right = right && resumed.get_scale() == scaler.get_scale() &&
          resumed.scaler().skipped_steps() == scaler.scaler().skipped_steps();

  // For fp32, in the same program.
  amp::GradScaler off({}, /*enabled=*/false);
  right = right && !off.is_enabled() && off.get_scale() == 1;
  return right ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
