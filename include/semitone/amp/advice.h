#pragma once

#include "semitone/amp/opt_level.h"
#include "semitone/autocast/model.h"

#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace semitone::amp {

/// What makes a model slower than its GPU allows, and what to do about it.
struct Advice {
  std::string name;  ///< the subject: "memory_format"
  std::string text;  ///< one line: the layers or the setting, the figure, the remedy
};

/// What advice depends on besides the model and its properties. All fields may be set by hand, to
/// ask about a GPU that this machine does not have.
struct DeviceFacts {
  c10::DeviceType type = c10::DeviceType::CPU;
  int compute_capability = 0;    ///< 10 · major + minor: 80 for 8.0. 0: unknown, or not CUDA
  bool tf32_products = false;    ///< LibTorch computes fp32 matrix products in TF32
  bool cudnn_benchmark = false;  ///< cuDNN times its algorithms
};

/// Returns the facts about a device, and LibTorch's present settings. The capability is that of
/// NVIDIA's driver.
DeviceFacts device_facts(c10::Device device);

/// Returns advice for models at an opt level, in this order:
///
/// | name | given if |
/// |---|---|
/// | tensor_cores | 16 bits on a GPU without tensor cores (before 7.0) |
/// | bf16 | bf16 before compute capability 8.0, where it is converted to fp32 and back |
/// | memory_format | 16-bit 2-d convolutions whose weights are not channels last |
/// | multiple_of_8 | sizes of 16-bit layers that are no multiple of 8 |
/// | tf32 | fp32 matrix products without TF32, from 8.0 on |
/// | cudnn_benchmark | convolutions, and cuDNN does not time its algorithms |
///
/// Sizes: the features of linear layers with 65,536 weights or more, the channels of convolutions
/// above 4 (images have fewer), hidden sizes, the sizes of attention heads, and vocabularies from
/// 1,000 on. Source: NVIDIA's guide "Train With Mixed Precision", "Optimizing For Tensor Cores".
/// The layers are those of torch::nn, also in TorchScript, and semitone::nn. Others are not seen,
/// and neither are batch sizes.
///
/// A setting that the options set themselves is not advised on, nor are layers that stay fp32
/// (keep_fp32_params, KeepFp32) as 16-bit ones. There is no advice for other devices than CUDA, for
/// an unknown compute capability, and with enabled(false).
///
/// amp::initialize logs it at verbosity 1 and above, each text once per process, on rank 0.
///
///     // What would be said on an A100?
///     const auto properties = amp::Properties::resolve(amp::Options("O2"), torch::kCUDA);
///     for (const auto& [name, text] : amp::advice({model}, properties, {torch::kCUDA, 80})) …
///
/// @param properties  MixedPrecision::properties(), or Properties::resolve(options, device)
std::vector<Advice> advice(const std::vector<Model>& models, const Properties& properties,
                           const DeviceFacts& device);
/// The same for the device that the model is on.
std::vector<Advice> advice(const Model& model, const Properties& properties);

}  // namespace semitone::amp
