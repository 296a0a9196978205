#pragma once

#include "semitone/amp/detail/option_values.h"
#include "semitone/autocast/cast_policy.h"
#include "semitone/scaling/loss_scale.h"

#include <c10/core/DeviceType.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace semitone::amp {

/// The precision of training: Apex's four levels.
///
/// | level | weights | operators           | BatchNorm | master weights | loss scale |
/// |-------|---------|---------------------|-----------|----------------|------------|
/// | O0    | fp32    | fp32                | fp32      | no             | 1          |
/// | O1    | fp32    | as a policy says    | fp32      | not needed     | dynamic    |
/// | O2    | 16 bits | 16 bits             | fp32      | yes            | dynamic    |
/// | O3    | 16 bits | 16 bits             | 16 bits   | no             | 1          |
///
/// With bf16 the default loss scale is 1 at every level: bf16 has fp32's range, so a value
/// underflows only if it does in fp32. (Apex supports fp16 only.)
enum class OptLevel { O0, O1, O2, O3 };

std::string_view name_of(OptLevel level);
/// Parses "O0" … "O3". Error for anything else, with a hint if a zero stands for the letter O.
OptLevel parse_opt_level(std::string_view name);

/// Options of amp::initialize: a level, and the values that differ from its defaults. The setters
/// have Apex's names.
///
///     amp::Options(amp::OptLevel::O2).loss_scale(128.0).keep_batchnorm_fp32(false)
class Options {
 public:
  Options(OptLevel level = OptLevel::O1) : level_(level) {}  // NOLINT(google-explicit-constructor)
  Options(const std::string& level)                          // NOLINT(google-explicit-constructor)
      : level_(parse_opt_level(level)) {}
  Options(const char* level)  // NOLINT(google-explicit-constructor)
      : level_(parse_opt_level(level)) {}

  /// False: initialize changes nothing, forward calls the model, scale_loss does not scale, and
  /// step calls optimizer.step(). Default true.
  Options& enabled(bool value);
  template <std::convertible_to<const char*> Text>
  Options& enabled(const Text& value) = delete;  ///< would be true, also for "False"
  /// The 16-bit dtype: fp16 or bf16. Default: default_16bit_dtype of the device.
  Options& dtype(c10::ScalarType value);
  /// The device of the models. Default: the device with most of their elements. initialize throws
  /// Error if a model has no tensor there, and forward throws Error if a model has moved since.
  Options& device(c10::DeviceType value);

  /// The dtype that weights and inputs are cast to: fp32, fp16 or bf16. A 16-bit dtype sets dtype()
  /// too. std::nullopt: no cast. At O1 only std::nullopt and fp32 are allowed. Default: fp32 at O0,
  /// std::nullopt at O1, dtype() at O2 and O3.
  Options& cast_model_type(std::optional<c10::ScalarType> value);
  /// Whether forward runs in an autocast region. (Apex patches torch's functions to the same
  /// effect, hence the name.) True is an Error at other levels than O1. Default: true at O1, else
  /// false.
  Options& patch_torch_functions(bool value);
  template <std::convertible_to<const char*> Text>
  Options& patch_torch_functions(const Text& value) = delete;
  /// Whether affine BatchNorm layers and modules marked KeepFp32 keep their weights, buffers and
  /// arithmetic in fp32. Error at O1, where all weights are fp32. Default: true at O2, else false.
  Options& keep_batchnorm_fp32(detail::Flag value);
  /// Whether the optimizer updates fp32 copies of 16-bit weights. Error at O1. Default: true at O2,
  /// else false.
  Options& master_weights(detail::Flag value);
  /// A number, or "dynamic". Default: dynamic at O1 and O2 with fp16, else 1.
  Options& loss_scale(detail::LossScale value);
  /// The dtype that forward's results are cast to. Default: fp32, so that a loss outside of forward
  /// is computed in fp32. (Apex's patches also cover the loss, and its O1 does not cast results.)
  Options& cast_model_outputs(c10::ScalarType value);
  /// Whether step() does the steps of LibTorch's SGD, Adam and AdamW in one pass over memory, as
  /// Semitone's optimizers do (optim/fused_optimizer.h), instead of a pass for each operation. State
  /// and files stay the optimizer's own. Parameters may differ from those of optimizer.step() by
  /// rounding. The whole step is LibTorch's for any other class, also a derived one, and if a
  /// parameter has a sparse gradient, is not fp32 (16 bits without masters), or shares memory with
  /// another. Without effect in a disabled MixedPrecision and within ZeroRedundancyOptimizer.
  /// Default false.
  Options& fuse_optimizers(bool value);
  /// Number of loss scalers, selected by loss_id. Default 1.
  Options& num_losses(std::int64_t value);
  /// Logging. 0: nothing. 1: the level, its properties, advice for a GPU (amp/advice.h), and
  /// skipped steps. 2: also every cast. Default 1.
  Options& verbosity(int value);
  /// Bounds of a dynamic scale. Default 2^-24 (Apex: none) and 2^24.
  Options& min_loss_scale(double value);
  Options& max_loss_scale(double value);
  /// The other options of the loss scale: growth_interval, growth_factor, backoff_factor,
  /// hysteresis, max_consecutive_skips … They do not turn scaling on: where the default loss_scale is
  /// 1, as in bf16, they have no effect without loss_scale("dynamic"). The init_scale and bounds of
  /// the value apply unless the setters above set them. If the value is not dynamic
  /// (LossScaleOptions::fixed), its init_scale is the constant scale, unless loss_scale sets one. A
  /// constant scale together with loss_scale "dynamic" is an Error.
  Options& loss_scale_options(const LossScaleOptions& value);
  /// The policy of O1's region. At O2 and O3 it selects the parameters that stay fp32
  /// (CastPolicy::keep_fp32_params) and the products in fp8 (CastPolicy::fp8). Default:
  /// CastPolicy::semitone. The policy's own device and dtype are ignored in favour of device() and
  /// dtype().
  Options& policy(CastPolicy value);

  /// The memory format of the weights of Conv2d and ConvTranspose2d layers. The format decides how
  /// these layers compute, and the memory format of their results. ChannelsLast is faster in 16
  /// bits, on CPUs and on tensor cores; Contiguous is LibTorch's usual format. initialize converts
  /// the weights once. A converted weight gets new memory. A tensor of another kind of layer that
  /// shared the old memory keeps it, and is no longer tied to the weight. Default: Preserve, which
  /// converts nothing.
  ///
  /// `x.view({x.size(0), -1})` of a channels-last tensor needs a copy, so LibTorch raises an error.
  /// Inside forward at O1 to O3, Semitone's own kernel for `view` (CastPolicy::fast_kernel) copies
  /// instead, as reshape() does, so that writes through such a view are lost. (CastPolicy::semitone
  /// has this kernel, on every device.) Elsewhere use reshape(): for forward's results, for weights
  /// or gradients (torch::nn::utils::parameters_to_vector), and after loading a saved model, whose
  /// weights keep their memory format.
  Options& memory_format(c10::MemoryFormat value);
  /// Lets initialize choose the memory format. It chooses ChannelsLast at O1 to O3 for models with
  /// such layers on a CPU, or on a CUDA device with tensor cores (compute capability 7.0 or newer),
  /// if the policy has Semitone's kernel for `view` and no optimizer is LBFGS, which views gradients
  /// as vectors. Otherwise it chooses Preserve. Properties::memory_format holds the result.
  Options& choose_memory_format();

  /// Settings of cuDNN's convolutions on CUDA devices. These are LibTorch's settings for the whole
  /// process. They last as long as the object that initialize returns. With several objects the
  /// most recent one wins; destroying it restores the previous values. (Paddle:
  /// cudnn_exhaustive_search, conv_workspace_size_limit. Paddle's
  /// cudnn_batchnorm_spatial_persistent has no counterpart: LibTorch uses cuDNN's persistent
  /// BatchNorm in training for channels-last inputs only.)
  ///
  /// Whether cuDNN times its algorithms for each new shape and keeps the fastest. Useful if shapes
  /// rarely change. Default: LibTorch's setting, false.
  Options& cudnn_benchmark(bool value);
  /// Number of algorithms to time; 0: all. Default: LibTorch's setting, 10.
  Options& cudnn_benchmark_limit(int value);
  /// Largest workspace of a convolution in MiB, at least 1. Sets the environment variable
  /// CUDNN_CONV_WSCAP_DBG, which cuDNN reads at the first convolution of the process. Call
  /// initialize before that, and before other threads read the environment. The variable is not
  /// reset afterwards. Default: unchanged, no limit.
  Options& cudnn_workspace_limit(std::int64_t mebibytes);

  OptLevel opt_level() const { return level_; }

 private:
  friend struct Properties;

  OptLevel level_;
  bool enabled_ = true;
  std::optional<c10::ScalarType> dtype_;
  std::optional<c10::DeviceType> device_;
  std::optional<std::optional<c10::ScalarType>> cast_model_type_;
  std::optional<bool> patch_torch_functions_;
  std::optional<bool> keep_batchnorm_fp32_;
  std::optional<bool> master_weights_;
  std::optional<detail::LossScale> loss_scale_;
  std::optional<c10::ScalarType> cast_model_outputs_;
  bool fuse_optimizers_ = false;
  std::int64_t num_losses_ = 1;
  int verbosity_ = 1;
  std::optional<double> min_loss_scale_;
  std::optional<double> max_loss_scale_;
  std::optional<LossScaleOptions> loss_scale_options_;
  std::optional<CastPolicy> policy_;
  std::optional<c10::MemoryFormat> memory_format_ = c10::MemoryFormat::Preserve;
  detail::CudnnSettings cudnn_;
};

/// The settings in force: the level's defaults with the options applied, and checked.
struct Properties {
  bool enabled = true;
  OptLevel opt_level = OptLevel::O1;
  c10::DeviceType device = c10::DeviceType::CPU;
  c10::ScalarType dtype = c10::ScalarType::Half;
  std::optional<c10::ScalarType> cast_model_type;  ///< std::nullopt: no cast of weights, inputs
  bool patch_torch_functions = false;
  bool keep_batchnorm_fp32 = false;
  bool master_weights = false;
  detail::LossScale loss_scale = 1.0;
  c10::ScalarType cast_model_outputs = c10::ScalarType::Float;
  bool fuse_optimizers = false;
  std::int64_t num_losses = 1;
  int verbosity = 1;
  LossScaleOptions loss_scale_options;  ///< complete: with loss_scale and its bounds
  std::optional<CastPolicy> policy;     ///< as set in the options
  /// std::nullopt until initialize has chosen.
  std::optional<c10::MemoryFormat> memory_format = c10::MemoryFormat::Preserve;
  detail::CudnnSettings cudnn;

  /// Returns the defaults of a level for a 16-bit dtype: one row of the table above.
  static Properties defaults(OptLevel level, c10::ScalarType dtype);

  /// @param model_device  the models' device, used if the options do not set one
  /// Error if options contradict each other; see the setters of Options.
  static Properties resolve(const Options& options, c10::DeviceType model_device);

  /// Returns several lines, as logged at verbosity 1.
  std::string to_string() const;
};

}  // namespace semitone::amp
