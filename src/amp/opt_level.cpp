#include "semitone/amp/opt_level.h"

#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/scaling/detail/loss_scale_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace semitone::amp {
namespace {

constexpr std::array<std::pair<std::string_view, OptLevel>, 4> kLevels{
    {{"O0", OptLevel::O0}, {"O1", OptLevel::O1}, {"O2", OptLevel::O2}, {"O3", OptLevel::O3}}};

}  // namespace

std::string_view name_of(OptLevel level) {
  return kLevels[static_cast<std::size_t>(level)].first;
}

OptLevel parse_opt_level(std::string_view name) {
  for (const auto& [candidate, level] : kLevels) {
    if (name == candidate) return level;
  }
  const bool zero = name.size() == 2 && name[0] == '0';
  throw Error("amp.opt_level", "O0, O1, O2 or O3", fmt::format("'{}'", name),
              zero ? "the first character is the letter O, not the digit zero" : "");
}

Options& Options::enabled(bool value) {
  enabled_ = value;
  return *this;
}

Options& Options::dtype(c10::ScalarType value) {
  if (!is_16bit(value))
    throw Error("amp.initialize", "dtype float16 or bfloat16", dtype_name(value));
  dtype_ = value;
  return *this;
}

Options& Options::device(c10::DeviceType value) {
  device_ = value;
  return *this;
}

Options& Options::cast_model_type(std::optional<c10::ScalarType> value) {
  if (value.has_value() && !is_16bit(*value) && *value != c10::ScalarType::Float) {
    throw Error("amp.initialize", "cast_model_type float32, float16, bfloat16 or none",
                dtype_name(*value));
  }
  cast_model_type_ = value;
  return *this;
}

Options& Options::patch_torch_functions(bool value) {
  patch_torch_functions_ = value;
  return *this;
}

Options& Options::keep_batchnorm_fp32(detail::Flag value) {
  keep_batchnorm_fp32_ = value.value();
  return *this;
}

Options& Options::master_weights(detail::Flag value) {
  master_weights_ = value.value();
  return *this;
}

Options& Options::loss_scale(detail::LossScale value) {
  loss_scale_ = value;
  return *this;
}

Options& Options::cast_model_outputs(c10::ScalarType value) {
  if (!c10::isFloatingType(value)) {
    throw Error("amp.initialize", "a floating cast_model_outputs", dtype_name(value));
  }
  cast_model_outputs_ = value;
  return *this;
}

Options& Options::fuse_optimizers(bool value) {
  fuse_optimizers_ = value;
  return *this;
}

Options& Options::num_losses(std::int64_t value) {
  if (value < 1)
    throw Error("amp.initialize", "num_losses of at least 1", fmt::format("{}", value));
  num_losses_ = value;
  return *this;
}

Options& Options::verbosity(int value) {
  if (value < 0 || value > 2)
    throw Error("amp.initialize", "verbosity 0, 1 or 2", fmt::format("{}", value));
  verbosity_ = value;
  return *this;
}

Options& Options::min_loss_scale(double value) {
  LossScaleOptions().min_scale(value);  // checks it
  min_loss_scale_ = value;
  return *this;
}

Options& Options::max_loss_scale(double value) {
  LossScaleOptions().max_scale(value);  // checks it
  max_loss_scale_ = value;
  return *this;
}

Options& Options::loss_scale_options(const LossScaleOptions& value) {
  loss_scale_options_ = value;
  return *this;
}

Options& Options::policy(CastPolicy value) {
  policy_ = std::move(value);
  return *this;
}

Options& Options::memory_format(c10::MemoryFormat value) {
  if (value != c10::MemoryFormat::Preserve && value != c10::MemoryFormat::Contiguous &&
      value != c10::MemoryFormat::ChannelsLast) {
    throw Error("amp.options.memory_format", "Preserve, Contiguous or ChannelsLast",
                c10::str(value));
  }
  memory_format_ = value;
  return *this;
}

Options& Options::choose_memory_format() {
  memory_format_.reset();
  return *this;
}

Options& Options::cudnn_benchmark(bool value) {
  cudnn_.benchmark = value;
  return *this;
}

Options& Options::cudnn_benchmark_limit(int value) {
  if (value < 0)
    throw Error("amp.options.cudnn_benchmark_limit", "0 or more", std::to_string(value));
  cudnn_.benchmark_limit = value;
  return *this;
}

Options& Options::cudnn_workspace_limit(std::int64_t mebibytes) {
  if (mebibytes < 1)
    throw Error("amp.options.cudnn_workspace_limit", "1 MiB or more", std::to_string(mebibytes));
  cudnn_.workspace_limit = mebibytes;
  return *this;
}

Properties Properties::defaults(OptLevel level, c10::ScalarType dtype) {
  const detail::LossScale scale =
      dtype == c10::ScalarType::BFloat16 ? detail::LossScale(1.0) : detail::LossScale("dynamic");
  Properties properties;
  properties.opt_level = level;
  properties.dtype = dtype;
  switch (level) {
    case OptLevel::O0:
      properties.cast_model_type = c10::ScalarType::Float;
      break;
    case OptLevel::O1:
      properties.patch_torch_functions = true;
      properties.loss_scale = scale;
      break;
    case OptLevel::O2:
      properties.cast_model_type = dtype;
      properties.keep_batchnorm_fp32 = true;
      properties.master_weights = true;
      properties.loss_scale = scale;
      break;
    case OptLevel::O3:
      properties.cast_model_type = dtype;
      break;
  }
  return properties;
}

Properties Properties::resolve(const Options& options, c10::DeviceType model_device) {
  const OptLevel level = options.level_;
  const auto conflict = [level](const char* expected, std::string got, const char* remedy) {
    throw Error("amp.initialize", expected, fmt::format("{} with {}", name_of(level), got), remedy);
  };
  const c10::DeviceType device = options.device_.value_or(model_device);
  c10::ScalarType dtype = options.dtype_.value_or(default_16bit_dtype(device));

  const auto cast = options.cast_model_type_;
  if (cast.has_value() && cast->has_value() && is_16bit(**cast)) {
    if (level == OptLevel::O1) {
      conflict("no 16-bit cast_model_type at O1", "cast_model_type " + dtype_name(**cast),
               "O1 casts operators, not models: choose the dtype with dtype(), or use O2");
    }
    if (options.dtype_.has_value() && options.dtype_ != **cast) {
      conflict("one 16-bit dtype",
               "dtype " + dtype_name(dtype) + " and cast_model_type " + dtype_name(**cast),
               "set one of the two");
    }
    dtype = **cast;
  }
  if (level == OptLevel::O1 && options.keep_batchnorm_fp32_.has_value()) {
    conflict("no keep_batchnorm_fp32 at O1", "keep_batchnorm_fp32", "all weights are fp32 at O1");
  }
  if (level == OptLevel::O1 && options.master_weights_.has_value()) {
    conflict("no master_weights at O1", "master_weights",
             "all weights are fp32 at O1, so there are no masters");
  }
  if (level != OptLevel::O1 && options.patch_torch_functions_.value_or(false)) {
    conflict("patch_torch_functions at O1 only", "patch_torch_functions", "use O1");
  }

  Properties properties = defaults(level, dtype);
  properties.enabled = options.enabled_;
  properties.device = device;
  if (cast.has_value()) properties.cast_model_type = *cast;
  properties.patch_torch_functions =
      options.patch_torch_functions_.value_or(properties.patch_torch_functions);
  properties.keep_batchnorm_fp32 =
      options.keep_batchnorm_fp32_.value_or(properties.keep_batchnorm_fp32);
  properties.master_weights = options.master_weights_.value_or(properties.master_weights);
  properties.loss_scale = options.loss_scale_.value_or(properties.loss_scale);
  properties.cast_model_outputs =
      options.cast_model_outputs_.value_or(properties.cast_model_outputs);
  properties.fuse_optimizers = options.fuse_optimizers_;
  properties.num_losses = options.num_losses_;
  properties.verbosity = options.verbosity_;
  properties.policy = options.policy_;
  properties.memory_format = options.memory_format_;
  properties.cudnn = options.cudnn_;

  // Apex's upper bound of 2^24 applies unless the options set another one.
  LossScaleOptions rule =
      options.loss_scale_options_.value_or(LossScaleOptions().max_scale(0x1p24));
  if (!rule.dynamic()) {
    if (options.loss_scale_.has_value() && options.loss_scale_->is_dynamic()) {
      conflict("one loss scale", "loss_scale dynamic and loss_scale_options that are not",
               "omit one of the two");
    }
    if (!options.loss_scale_.has_value()) properties.loss_scale = rule.init_scale();
  }
  if (options.min_loss_scale_.has_value()) rule.min_scale(*options.min_loss_scale_);
  if (options.max_loss_scale_.has_value()) rule.max_scale(*options.max_loss_scale_);
  if (!properties.loss_scale.is_dynamic()) {
    // An explicit scale is not clamped to the bounds of a dynamic one.
    const double scale = properties.loss_scale.value();
    rule.dynamic(false).init_scale(scale);
    rule.min_scale(std::min(rule.min_scale(), scale)).max_scale(std::max(rule.max_scale(), scale));
  }
  detail::initial_loss_scale(rule);  // checks it
  properties.loss_scale_options = rule;
  return properties;
}

std::string Properties::to_string() const {
  if (!enabled) return "mixed precision: disabled";
  const auto yes = [](bool value) { return value ? "yes" : "no"; };
  std::string text = fmt::format(
      "opt level {} with {} on {}\n"
      "  cast_model_type       {}\n"
      "  patch_torch_functions {} (autocast{})\n"
      "  keep_batchnorm_fp32   {}\n"
      "  master_weights        {}\n"
      "  loss_scale            {}\n"
      "  cast_model_outputs    {}\n"
      "  memory_format         {}",
      name_of(opt_level), dtype_name(dtype), c10::DeviceTypeName(device, true),
      cast_model_type.has_value() ? dtype_name(*cast_model_type) : "none",
      yes(patch_torch_functions),
      patch_torch_functions
          ? fmt::format(", policy '{}'", policy.has_value() ? policy->name() : "semitone")
          : " off",
      yes(keep_batchnorm_fp32), yes(master_weights), loss_scale.to_string(),
      dtype_name(cast_model_outputs),
      memory_format.has_value() ? c10::str(*memory_format) : "chosen for each model");
  const auto add = [&](const char* name, const std::string& value) {
    text += fmt::format("\n  {:<21} {}", name, value);
  };
  // Emulated operators take fp32's time, plus the conversions.
  const bool has_16bit = cast_model_type != c10::ScalarType::Float || patch_torch_functions;
  if (device == c10::DeviceType::CPU && has_16bit) {
    const auto kinds = describe_16bit(device, dtype);
    if (kinds != "native") add("emulation", kinds + ": through float32, at no more than its speed");
  }
  if (fuse_optimizers) add("fuse_optimizers", "yes");
  if (cudnn.benchmark.has_value()) add("cudnn_benchmark", yes(*cudnn.benchmark));
  if (cudnn.benchmark_limit.has_value())
    add("cudnn_benchmark_limit", std::to_string(*cudnn.benchmark_limit));
  if (cudnn.workspace_limit.has_value())
    add("cudnn_workspace_limit", std::to_string(*cudnn.workspace_limit) + " MiB");
  return text;
}

}  // namespace semitone::amp
