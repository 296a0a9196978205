#pragma once

#include "semitone/amp/cast_policy.h"
#include "semitone/amp/loss_scale.h"

#include <c10/core/DeviceType.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace semitone::amp {

/// How a model is trained: Apex's four levels.
///
/// | level | weights | operators           | BatchNorm | master weights | loss scale |
/// |-------|---------|---------------------|-----------|----------------|------------|
/// | O0    | fp32    | fp32                | fp32      | no             | 1          |
/// | O1    | fp32    | as a policy says    | fp32      | not needed     | dynamic    |
/// | O2    | 16 bits | 16 bits             | fp32      | yes            | dynamic    |
/// | O3    | 16 bits | 16 bits             | 16 bits   | no             | 1          |
///
/// With bf16 the default loss scale is 1 at every level: bf16 has fp32's range, nothing underflows
/// that fp32 would keep. (Apex knows fp16 only.)
enum class OptLevel { O0, O1, O2, O3 };

std::string_view name_of(OptLevel level);
/// Parses "O0" … "O3". Error for anything else, with a hint where a zero stands for the letter O.
OptLevel parse_opt_level(std::string_view name);

/// A loss scale as a user gives it: a number above 0, as text too, or "dynamic". Error otherwise.
class LossScale {
 public:
  LossScale(double scale);              // NOLINT(google-explicit-constructor)
  LossScale(const std::string& scale);  // NOLINT(google-explicit-constructor)
  LossScale(const char* scale)          // NOLINT(google-explicit-constructor)
      : LossScale(std::string(scale)) {}

  bool is_dynamic() const { return dynamic_; }
  /// The number; 1 if dynamic.
  double value() const { return value_; }
  std::string to_string() const;

 private:
  bool dynamic_ = false;
  double value_ = 1.0;
};

/// Yes, no, or "True" / "False" as programs pass on what stood on their command line. Error for any
/// other text.
class Flag {
 public:
  Flag(bool value) : value_(value) {}                  // NOLINT(google-explicit-constructor)
  Flag(const std::string& text);                       // NOLINT(google-explicit-constructor)
  Flag(const char* text) : Flag(std::string(text)) {}  // NOLINT(google-explicit-constructor)
  bool value() const { return value_; }

 private:
  bool value_;
};

/// See Options::cudnn_benchmark. Nothing: left as it is.
struct CudnnSettings {
  std::optional<bool> benchmark;
  std::optional<int> benchmark_limit;
  std::optional<std::int64_t> workspace_limit;  ///< MiB
};

/// What amp::initialize is asked for: a level, and what is to differ from the level's defaults. The
/// setters carry Apex's names.
///
///     amp::Options(amp::OptLevel::O2).loss_scale(128.0).keep_batchnorm_fp32(false)
class Options {
 public:
  Options(OptLevel level = OptLevel::O1) : level_(level) {}  // NOLINT(google-explicit-constructor)
  Options(const std::string& level)                          // NOLINT(google-explicit-constructor)
      : level_(parse_opt_level(level)) {}
  Options(const char* level)  // NOLINT(google-explicit-constructor)
      : level_(parse_opt_level(level)) {}

  /// False: initialize changes nothing, forward, scale_loss and step only pass on. Default true.
  Options& enabled(bool value);
  /// fp16 or bf16: what "16 bits" is. Default: default_16bit_dtype of the device.
  Options& dtype(c10::ScalarType value);
  /// Where the models are. Default: the device of most of their elements. initialize raises an Error
  /// if a model has nothing there, forward if it was moved since.
  Options& device(c10::DeviceType value);

  /// The dtype that weights and inputs are cast to: fp32, fp16 or bf16 (a 16-bit one sets dtype()
  /// too); nothing: no cast. Error at O1 unless nothing or fp32. Default: fp32 at O0, nothing at
  /// O1, dtype() at O2 and O3.
  Options& cast_model_type(std::optional<c10::ScalarType> value);
  /// Whether forward runs in an autocast region. (Apex patches torch's functions for that.) Only O1
  /// can have it, and has.
  Options& patch_torch_functions(bool value);
  /// Whether affine BatchNorm layers and modules marked KeepFp32 keep their weights, buffers and
  /// arithmetic in fp32. Error at O1, where all weights are fp32. Default: at O2.
  Options& keep_batchnorm_fp32(Flag value);
  /// Whether the optimizer works on fp32 copies of 16-bit weights. Error at O1. Default: at O2.
  Options& master_weights(Flag value);
  /// A number, or "dynamic". Default: dynamic at O1 and O2 with fp16, else 1.
  Options& loss_scale(LossScale value);
  /// The dtype that forward's results are cast to. Default: fp32, so that a loss outside of forward
  /// is computed in fp32. (Apex's patches reach the loss too, and its O1 leaves results as they
  /// are.)
  Options& cast_model_outputs(c10::ScalarType value);
  /// How many losses are scaled one by one, each with its own loss_id. Default 1.
  Options& num_losses(std::int64_t value);
  /// 0: silent; 1: the level and its properties, and skipped steps; 2: every cast too. Written to
  /// the log. Default 1.
  Options& verbosity(int value);
  /// Bounds of a dynamic scale. Default 2^-24 (Apex: none) and 2^24.
  Options& min_loss_scale(double value);
  Options& max_loss_scale(double value);
  /// The rest of the scale's rule: window, factors, hysteresis, max_consecutive_skips …; its
  /// init_scale and bounds are taken too, unless set above. A rule that is not dynamic
  /// (LossScaleOptions::fixed) gives the number too, unless loss_scale does; with loss_scale
  /// "dynamic" it is an Error.
  Options& loss_scale_options(const LossScaleOptions& value);
  /// The policy of O1's region, and the parameters that stay fp32 at O2 and O3
  /// (CastPolicy::keep_fp32_params). Default: CastPolicy::semitone. Its device and dtype count for
  /// nothing: those above do.
  Options& policy(CastPolicy value);

  /// How the weights of Conv2d and ConvTranspose2d layers lie, which decides how these layers
  /// compute, and how what they return lies: ChannelsLast is faster in 16 bits, on CPUs and on tensor
  /// cores. initialize lays the weights out once; tensors of other layers that share their memory are
  /// parted from them. Contiguous does so in LibTorch's usual layout. Default: Preserve, everything
  /// stays as it is.
  ///
  /// What lies channels last, `x.view({x.size(0), -1})` cannot show without a copy: LibTorch raises.
  /// Inside forward's region the fast kernel "view" (CastPolicy::semitone has it, on a CPU) copies,
  /// as reshape() does: what is written through such a view is lost. Elsewhere — in code on forward's
  /// results, on weights or gradients (torch::nn::utils::parameters_to_vector), or after loading a
  /// saved model, whose weights lie as they did — take reshape().
  Options& memory_format(c10::MemoryFormat value);
  /// Lets initialize choose: ChannelsLast at O1 to O3 for models with such layers, on a CPU, if the
  /// policy has the fast kernel "view" and no optimizer is LBFGS, which views gradients as vectors;
  /// else Preserve. Properties::memory_format says what was chosen.
  Options& choose_memory_format();

  /// How cuDNN computes convolutions on CUDA devices. These are LibTorch's settings, and hold for the
  /// whole process: those given here hold as long as what initialize returns lives, of several the
  /// last one's; then they are as before. (Paddle: cudnn_exhaustive_search, conv_workspace_size_limit. Its
  /// cudnn_batchnorm_spatial_persistent is what LibTorch does in training by itself.)
  ///
  /// Whether it times its algorithms for each new shape, and keeps the fastest: for shapes that stay.
  /// Default: as LibTorch has it, false.
  Options& cudnn_benchmark(bool value);
  /// How many algorithms are timed; 0: all. Default: as LibTorch has it, 10.
  Options& cudnn_benchmark_limit(int value);
  /// The most MiB of workspace that a convolution may take, at least 1: the environment variable
  /// CUDNN_CONV_WSCAP_DBG, which cuDNN reads at the process's first convolution. Call initialize
  /// before, and before other threads look at the environment. The variable stays set. Default: as it
  /// is, no limit.
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
  std::optional<LossScale> loss_scale_;
  std::optional<c10::ScalarType> cast_model_outputs_;
  std::int64_t num_losses_ = 1;
  int verbosity_ = 1;
  std::optional<double> min_loss_scale_;
  std::optional<double> max_loss_scale_;
  std::optional<LossScaleOptions> loss_scale_options_;
  std::optional<CastPolicy> policy_;
  std::optional<c10::MemoryFormat> memory_format_ = c10::MemoryFormat::Preserve;
  CudnnSettings cudnn_;
};

/// What is in force: the level's defaults with the options applied, checked for sense.
struct Properties {
  bool enabled = true;
  OptLevel opt_level = OptLevel::O1;
  c10::DeviceType device = c10::DeviceType::CPU;
  c10::ScalarType dtype = c10::ScalarType::Half;
  std::optional<c10::ScalarType> cast_model_type;  ///< nothing: weights and inputs stay as they are
  bool patch_torch_functions = false;
  bool keep_batchnorm_fp32 = false;
  bool master_weights = false;
  LossScale loss_scale = 1.0;
  c10::ScalarType cast_model_outputs = c10::ScalarType::Float;
  std::int64_t num_losses = 1;
  int verbosity = 1;
  LossScaleOptions loss_scale_options;  ///< the rule that loss_scale and its bounds amount to
  std::optional<CastPolicy> policy;     ///< as given
  /// Nothing until initialize has chosen.
  std::optional<c10::MemoryFormat> memory_format = c10::MemoryFormat::Preserve;
  CudnnSettings cudnn;

  /// The defaults of a level for a 16-bit dtype: one row of the table above.
  static Properties defaults(OptLevel level, c10::ScalarType dtype);

  /// @param model_device  where the model is, if the options do not say
  /// Error for what contradicts itself: see the setters of Options.
  static Properties resolve(const Options& options, c10::DeviceType model_device);

  /// Several lines, as verbosity 1 prints them.
  std::string to_string() const;
};

}  // namespace semitone::amp
