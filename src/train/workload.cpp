#include "src/train/workload.h"

#include "semitone/amp/mixed_precision.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/nn/fused_cross_entropy.h"
#include "semitone/optim/fused_optimizer.h"
#include "src/core/dtype_limits.h"
#include "src/core/tensor_memory.h"
#include "src/optim/fused_state.h"
#include "src/train/models.h"
#include "src/train/setup.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>

namespace semitone::train {
namespace {

constexpr auto kWorkload = "train.workload";
using Clock = std::chrono::steady_clock;

constexpr double kMomentum = 0.9;
constexpr std::int64_t kMaxConsecutiveSkips = 100;

// The effect of one rounding in 16 bits, and of sums in another order in fp32. In bf16 with 16
// images the measured difference is 0.3 of it.
double tolerance_of(const WorkloadOptions& options) {
  constexpr double kFp32Tolerance = 1e-4;
  const c10::ScalarType dtype = precision_of(options).dtype();
  return is_16bit(dtype) ? dtype_limits(dtype).epsilon / 2 : kFp32Tolerance;
}

void check_options(const WorkloadOptions& options) {
  const auto require = [](const char* name, std::int64_t value, std::int64_t least) {
    if (value < least)
      throw Error(kWorkload, fmt::format("{} of at least {}", name, least), std::to_string(value));
  };
  require("batch_size", options.batch_size(), 1);
  require("image_size", options.image_size(), 32);
  if (!options.workload().has_images) require("length", options.length(), 1);
  require("check_steps", options.check_steps(), 2);
  require("warm_up", options.warm_up(), 1);
  precision_of(options).check(kWorkload);
}

Batch make_batch(const WorkloadOptions& options, MemoryFormat format) {
  const auto generator = at::detail::createCPUGenerator(options.seed());
  Batch batch = options.workload().make_batch(options, generator);
  // As Batches does.
  if (format == MemoryFormat::nhwc)
    batch.inputs = batch.inputs.clone(at::MemoryFormat::ChannelsLast);
  return {batch.inputs.to(options.device()), batch.labels.to(options.device())};
}

Classifier make_model(const WorkloadOptions& options) {
  torch::manual_seed(options.seed());
  Classifier model = options.workload().make_model(options);
  model.module()->to(options.device());
  return model;
}

// The name and the settings of the optimizer.
std::string optimizer_of(const WorkloadOptions& options) {
  return (options.fused_optimizer() ? "fused-" : "") + std::string(options.workload().optimizer);
}

OptimizerSettings settings_of(const WorkloadOptions& options) {
  return {.lr = options.workload().lr,
          .momentum = kMomentum,
          .weight_decay = options.workload().weight_decay,
          .split_masters = options.split_masters(),
          .bf16_state = options.bf16_state()};
}

amp::Options amp_options(const WorkloadOptions& options, MemoryFormat format) {
  const Precision precision = precision_of(options);
  amp::Options result = precision.amp_options(format);
  result.loss_scale_options(amp::LossScaleOptions().max_consecutive_skips(kMaxConsecutiveSkips));
  if (options.policy().has_value()) result.policy(*options.policy());
  // The loss accepts logits of any dtype.
  if (options.opt_level() != amp::OptLevel::O0) result.cast_model_outputs(precision.lower_dtype());
  return result;
}

MemoryFormat chosen_format(const WorkloadOptions& options) {
  if (!options.workload().has_images) return MemoryFormat::nchw;
  return resolve(options.memory_format(), options.device().type());
}

// Counts bytes, each block of memory once.
class Bytes {
 public:
  std::int64_t of(const at::Tensor& tensor) {
    if (!tensor.defined() || !seen_.insert(tensor.storage().unsafeGetStorageImpl()).second)
      return 0;
    return static_cast<std::int64_t>(tensor.storage().nbytes());
  }

 private:
  std::unordered_set<const void*> seen_;
};

// The loop that is measured.
class WorkloadTraining {
 public:
  using Between = std::function<void()>;
  struct Done {
    double loss;
    bool skipped;
  };

  WorkloadTraining(const WorkloadOptions& options, MemoryFormat format)
      : setup_(precision_of(options), make_model(options), optimizer_of(options),
               settings_of(options), amp_options(options, format)) {
    setup_.model.module()->train();
  }

  // @param between  called between backward and the optimizer's step
  Done step(const Batch& batch, const Between& between = {}) {
    setup_.optimizer->zero_grad();
    const at::Tensor loss = loss_of(setup_.model.forward(setup_.mixed, batch.inputs), batch.labels);
    setup_.mixed.scale_loss(loss, *setup_.optimizer).backward();
    if (between) between();
    const bool skipped = setup_.mixed.step(*setup_.optimizer) == amp::Step::skipped;
    const double value = loss.item<double>();
    if (!skipped && !std::isfinite(value))
      throw DivergedError(kWorkload, "a finite training loss", fmt::format("{}", value));
    return {value, skipped};
  }

  // Parameters, masters and state, which persist between steps.
  TensorMemory lasting_bytes() const {
    Bytes bytes;
    TensorMemory memory;
    for (const at::Tensor& tensor : setup_.model.module()->parameters())
      memory.parameters += bytes.of(tensor);
    for (const at::Tensor& tensor : setup_.model.module()->buffers())
      memory.parameters += bytes.of(tensor);
    for (const at::Tensor& tensor : setup_.mixed.master_params(*setup_.optimizer))
      memory.masters += bytes.of(tensor);
    for (const auto& [parameter, state] : setup_.optimizer->state()) {
      if (const auto* fused = dynamic_cast<const optim::FusedState*>(state.get())) {
        for (const at::Tensor& tensor : fused->tensors) memory.optimizer_state += bytes.of(tensor);
        memory.masters += bytes.of(fused->master_low);
      } else if (const auto* adamw =
                     dynamic_cast<const torch::optim::AdamWParamState*>(state.get())) {
        memory.optimizer_state += bytes.of(adamw->exp_avg()) + bytes.of(adamw->exp_avg_sq());
      } else if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(state.get())) {
        memory.optimizer_state += bytes.of(sgd->momentum_buffer());
      }
    }
    return memory;
  }

 private:
  static at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& labels) {
    return is_16bit(logits.scalar_type()) ? nn::fused_cross_entropy(logits, labels)
                                          : torch::cross_entropy_loss(logits, labels);
  }

  Setup setup_;
};

std::vector<double> first_losses(const WorkloadOptions& options, std::int64_t count) {
  const MemoryFormat format = chosen_format(options);
  WorkloadTraining training(options, format);
  const Batch batch = make_batch(options, format);
  std::vector<double> losses;
  while (static_cast<std::int64_t>(losses.size()) < count) {
    const auto done = training.step(batch);
    if (!done.skipped) losses.push_back(done.loss);
  }
  return losses;
}

WorkloadCheck prove(const WorkloadOptions& options) {
  WorkloadOptions exact = options;
  exact.encoder().dropout(0);
  WorkloadCheck check;
  check.losses = first_losses(exact, options.check_steps());
  exact.opt_level(amp::OptLevel::O0)
      .policy(std::nullopt)
      .fused_optimizer(false)
      .memory_format(MemoryFormat::nchw)
      .checkpoint_activations(false);
  check.fp32_losses =
      first_losses(exact, options.opt_level() == amp::OptLevel::O3 ? 1 : options.check_steps());
  check.tolerance = tolerance_of(options);
  if (!(check.difference() <= check.tolerance)) {
    throw Error(kWorkload,
                fmt::format("the losses of float32, {:.6g}, within {:.1e} of the first",
                            fmt::join(check.fp32_losses, " "), check.tolerance),
                fmt::format("{:.6g}", fmt::join(check.losses, " ")));
  }
  if (!(check.losses.back() < check.losses.front())) {
    throw Error(kWorkload, "losses that fall", fmt::format("{:.6g}", fmt::join(check.losses, " ")));
  }
  return check;
}

}  // namespace

WorkloadOptions::WorkloadOptions(std::string_view name) : WorkloadOptions(find_workload(name)) {}

WorkloadOptions::WorkloadOptions(const WorkloadChoice& workload)
    : batch_size_(workload.batch_size), length_(workload.length), workload_(&workload) {}

double WorkloadCheck::difference() const {
  double largest = 0;
  for (std::size_t i = 0; i < fp32_losses.size(); ++i) {
    const double off = std::abs(losses.at(i) - fp32_losses[i]);
    if (!(off <= largest)) largest = off;  // NaN stays
  }
  return largest / std::abs(fp32_losses.at(0));
}

struct Workload::Impl {
  explicit Impl(const WorkloadOptions& its_options)
      : options(its_options),
        format(chosen_format(options)),
        check(prove(options)),
        batch(make_batch(options, format)) {
    const TensorMemoryMeter meter;
    training = std::make_unique<WorkloadTraining>(options, format);
    // After backward, when activations have been freed; in the second step there is optimizer
    // state.
    std::int64_t held = 0;
    std::int64_t steps = 0;
    while (steps < std::max<std::int64_t>(2, options.warm_up())) {
      const auto done = training->step(batch, [&] { held = meter.current_bytes(); });
      if (!done.skipped) ++steps;
    }
    memory = training->lasting_bytes();
    memory.gradients = held - memory.parameters - memory.masters - memory.optimizer_state;
    memory.peak = meter.peak_bytes();
  }

  WorkloadOptions options;
  MemoryFormat format;
  WorkloadCheck check;
  Batch batch;
  std::unique_ptr<WorkloadTraining> training;
  TensorMemory memory;
  std::vector<double> losses;
  std::int64_t skipped = 0;
};

Workload::Workload(const WorkloadOptions& options) {
  check_options(options);
  impl_ = std::make_unique<Impl>(options);
}

Workload::~Workload() = default;
Workload::Workload(Workload&&) noexcept = default;
Workload& Workload::operator=(Workload&&) noexcept = default;

double Workload::run(std::int64_t steps) {
  if (steps < 1) throw Error(kWorkload, "at least one step", std::to_string(steps));
  const auto begin = Clock::now();
  for (std::int64_t i = 0; i < steps; ++i) {
    const auto done = impl_->training->step(impl_->batch);
    impl_->losses.push_back(done.loss);
    impl_->skipped += done.skipped ? 1 : 0;
  }
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

const std::vector<double>& Workload::losses() const {
  return impl_->losses;
}

std::int64_t Workload::skipped_steps() const {
  return impl_->skipped;
}

const WorkloadOptions& Workload::options() const {
  return impl_->options;
}

c10::ScalarType Workload::dtype() const {
  return precision_of(impl_->options).dtype();
}

MemoryFormat Workload::memory_format() const {
  return impl_->format;
}

std::int64_t Workload::items() const {
  const WorkloadOptions& options = impl_->options;
  return options.batch_size() * (options.workload().has_images ? 1 : options.length());
}

const WorkloadCheck& Workload::check() const {
  return impl_->check;
}

const TensorMemory& Workload::memory() const {
  return impl_->memory;
}

}  // namespace semitone::train
