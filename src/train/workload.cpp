#include "semitone/train/workload.h"

#include "semitone/amp/initialize.h"
#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/nn/fused_cross_entropy.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/train/meter.h"
#include "semitone/zoo/convnet.h"
#include "semitone/zoo/resnet50.h"
#include "src/train/batches.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
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

// The properties of a workload, except its model.
struct Traits {
  std::string_view name;
  std::int64_t batch_size;
  std::int64_t classes;  // of random labels
  bool adamw;
  double lr;
};

// Learning rates at which the first steps on a batch lower its loss at every level.
const Traits& traits_of(WorkloadKind kind) {
  static constexpr std::array<Traits, 3> kTraits{{{"mnist", 100, 10, false, 0.01},
                                                  {"resnet50", 16, 1000, false, 0.001},
                                                  {"encoder", 8, 0, true, 1e-4}}};
  return kTraits.at(static_cast<std::size_t>(kind));
}

constexpr double kMomentum = 0.9;
constexpr double kWeightDecay = 0.01;
constexpr std::int64_t kMnistSize = 28;
// With a larger gain, ResNet-50's losses depend on rounding, in fp32 too: no check would be
// possible.
constexpr double kResidualGain = 0.2;
constexpr double kMasked = 0.15;
constexpr std::int64_t kMaskToken = 0;
constexpr std::int64_t kMaxConsecutiveSkips = 100;

c10::ScalarType dtype_16bit(const WorkloadOptions& options) {
  return options.dtype().value_or(default_16bit_dtype(options.device()));
}

c10::ScalarType dtype_of(const WorkloadOptions& options) {
  return options.opt_level() == amp::OptLevel::O0 ? c10::ScalarType::Float : dtype_16bit(options);
}

// The effect of one rounding in 16 bits, and of sums in another order in fp32. In bf16 with 16
// images the measured difference is 0.3 of it.
double tolerance_of(const WorkloadOptions& options) {
  constexpr double kFp32Tolerance = 1e-4;
  const c10::ScalarType dtype = dtype_of(options);
  return is_16bit(dtype) ? dtype_limits(dtype).epsilon / 2 : kFp32Tolerance;
}

void check_options(const WorkloadOptions& options) {
  const auto require = [](const char* name, std::int64_t value, std::int64_t least) {
    if (value < least)
      throw Error(kWorkload, fmt::format("{} of at least {}", name, least), std::to_string(value));
  };
  require("batch_size", options.batch_size(), 1);
  require("image_size", options.image_size(), 32);
  require("length", options.length(), 1);
  require("check_steps", options.check_steps(), 2);
  require("warm_up", options.warm_up(), 1);
  if (options.dtype().has_value() && !is_16bit(*options.dtype()))
    throw Error(kWorkload, "float16 or bfloat16", dtype_name(*options.dtype()));
}

// A batch on which all steps train, in fp32.
struct FixedBatch {
  at::Tensor inputs;
  at::Tensor labels;
};

FixedBatch make_batch(const WorkloadOptions& options, MemoryFormat format) {
  const auto generator = at::detail::createCPUGenerator(options.seed());
  const std::int64_t count = options.batch_size();
  FixedBatch batch;
  if (options.kind() == WorkloadKind::encoder) {
    const std::vector<std::int64_t> sizes{count, options.length()};
    const at::Tensor tokens =
        torch::randint(options.encoder().vocabulary(), sizes, generator, torch::kLong);
    const at::Tensor masked = torch::rand(sizes, generator) < kMasked;
    batch = {tokens.masked_fill(masked, kMaskToken), tokens.flatten()};
  } else {
    const bool mnist = options.kind() == WorkloadKind::mnist;
    const std::int64_t size = mnist ? kMnistSize : options.image_size();
    batch.inputs = torch::randn({count, mnist ? 1 : 3, size, size}, generator);
    batch.labels =
        torch::randint(traits_of(options.kind()).classes, {count}, generator, torch::kLong);
    // As Batches does.
    if (format == MemoryFormat::nhwc)
      batch.inputs = batch.inputs.clone(at::MemoryFormat::ChannelsLast);
  }
  const c10::Device device(options.device());
  return {batch.inputs.to(device), batch.labels.to(device)};
}

Classifier make_model(const WorkloadOptions& options) {
  torch::manual_seed(options.seed());
  const auto make = [&]() -> Classifier {
    switch (options.kind()) {
      case WorkloadKind::mnist:
        return zoo::ConvNet();
      case WorkloadKind::resnet50:
        return zoo::ResNet50(traits_of(options.kind()).classes, kResidualGain);
      case WorkloadKind::encoder:
        break;
    }
    return zoo::Encoder(options.encoder());
  };
  Classifier model = make();
  model.module()->to(c10::Device(options.device()));
  return model;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<at::Tensor>& parameters,
                                                        const WorkloadOptions& options) {
  const Traits& traits = traits_of(options.kind());
  // fp16 weights without masters: see TrainOptions::optimizer.
  const bool fp16_only =
      options.opt_level() == amp::OptLevel::O3 && dtype_of(options) == torch::kHalf;
  const double eps = fp16_only ? 0x1p-14 : 1e-8;
  const auto set = [&](auto adamw) { return adamw.eps(eps).weight_decay(kWeightDecay); };
  const auto compact = [&](auto fused) {
    return fused.split_master(options.split_masters()).bf16_state(options.bf16_state());
  };
  if (options.fused_optimizer()) {
    if (traits.adamw) {
      return std::make_unique<optim::FusedAdam>(parameters,
                                                compact(set(optim::FusedAdamOptions(traits.lr))));
    }
    return std::make_unique<optim::FusedSGD>(
        parameters, compact(optim::FusedSGDOptions(traits.lr).momentum(kMomentum)));
  }
  if (traits.adamw)
    return std::make_unique<torch::optim::AdamW>(parameters,
                                                 set(torch::optim::AdamWOptions(traits.lr)));
  return std::make_unique<torch::optim::SGD>(
      parameters, torch::optim::SGDOptions(traits.lr).momentum(kMomentum));
}

amp::Options amp_options(const WorkloadOptions& options, MemoryFormat format) {
  amp::Options result(options.opt_level());
  result.dtype(dtype_16bit(options)).device(options.device()).verbosity(0);
  result.memory_format(layout_of(format));
  result.loss_scale_options(amp::LossScaleOptions().max_consecutive_skips(kMaxConsecutiveSkips));
  if (options.policy().has_value()) result.policy(*options.policy());
  // The loss accepts logits of any dtype.
  if (options.opt_level() != amp::OptLevel::O0) result.cast_model_outputs(dtype_16bit(options));
  return result;
}

MemoryFormat chosen_format(const WorkloadOptions& options) {
  if (options.kind() == WorkloadKind::encoder) return MemoryFormat::nchw;
  return options.memory_format() == MemoryFormat::automatic ? choose_memory_format(options.device())
                                                            : options.memory_format();
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
      : model_(make_model(options)),
        handle_(model_.module()),
        optimizer_(make_optimizer(model_.module()->parameters(), options)),
        mixed_(amp::initialize(handle_, *optimizer_, amp_options(options, format))) {
    model_.module()->train();
  }

  // @param between  called between backward and the optimizer's step
  Done step(const FixedBatch& batch, const Between& between = {}) {
    optimizer_->zero_grad();
    const at::Tensor loss = loss_of(model_.forward(mixed_, batch.inputs), batch.labels);
    mixed_.scale_loss(loss, *optimizer_).backward();
    if (between) between();
    const bool skipped = mixed_.step(*optimizer_) == amp::Step::skipped;
    const double value = loss.item<double>();
    if (!skipped && !std::isfinite(value))
      throw DivergedError(kWorkload, "a finite training loss", fmt::format("{}", value));
    return {value, skipped};
  }

  // Parameters, masters and state, which persist between steps.
  TensorMemory lasting_bytes() const {
    Bytes bytes;
    TensorMemory memory;
    for (const at::Tensor& tensor : model_.module()->parameters())
      memory.parameters += bytes.of(tensor);
    for (const at::Tensor& tensor : model_.module()->buffers())
      memory.parameters += bytes.of(tensor);
    for (const at::Tensor& tensor : mixed_.master_params(*optimizer_))
      memory.masters += bytes.of(tensor);
    for (const auto& [parameter, state] : optimizer_->state()) {
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

  Classifier model_;
  amp::Model handle_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  amp::MixedPrecision mixed_;
};

std::vector<double> first_losses(const WorkloadOptions& options, std::int64_t count) {
  const MemoryFormat format = chosen_format(options);
  WorkloadTraining training(options, format);
  const FixedBatch batch = make_batch(options, format);
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
      .memory_format(MemoryFormat::nchw);
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

std::string_view name_of(WorkloadKind kind) {
  return traits_of(kind).name;
}

WorkloadKind parse_workload(std::string_view name) {
  for (const auto kind : {WorkloadKind::mnist, WorkloadKind::resnet50, WorkloadKind::encoder}) {
    if (name == name_of(kind)) return kind;
  }
  throw Error(kWorkload, "mnist, resnet50 or encoder", "'" + std::string(name) + "'");
}

WorkloadOptions::WorkloadOptions(WorkloadKind kind)
    : batch_size_(traits_of(kind).batch_size), kind_(kind) {}

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
  FixedBatch batch;
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
  return dtype_of(impl_->options);
}

MemoryFormat Workload::memory_format() const {
  return impl_->format;
}

std::int64_t Workload::items() const {
  const WorkloadOptions& options = impl_->options;
  return options.batch_size() * (options.kind() == WorkloadKind::encoder ? options.length() : 1);
}

const WorkloadCheck& Workload::check() const {
  return impl_->check;
}

const TensorMemory& Workload::memory() const {
  return impl_->memory;
}

}  // namespace semitone::train
