#include "src/amp/advice.h"

#include "semitone/core/dtype.h"
#include "src/amp/layers.h"
#include "src/amp/rank.h"
#include "src/autocast/model_entries.h"
#include "src/core/cuda_driver.h"
#include "src/core/libtorch_release.h"
#include "src/core/log.h"

#include <ATen/Context.h>

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

namespace semitone::amp {
namespace {

using Kind = Layer::Kind;

constexpr int kTensorCores = 70;
constexpr int kBfloat16 = 80;
constexpr int kTf32 = 80;

std::string version(int compute_capability) {
  return fmt::format("{}.{}", compute_capability / 10, compute_capability % 10);
}

// The first names in quotes, and the number of the others.
std::string list(const std::vector<std::string>& names) {
  constexpr std::size_t kNamed = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kNamed); ++i)
    text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kNamed) text += fmt::format(" and {} more", names.size() - kNamed);
  return text;
}

std::string quoted(const Layer& layer) {
  return "'" + layer.name + "'";
}

// A model at an opt level on a device, and what is said about it.
class Advisor {
 public:
  Advisor(std::vector<Layer> layers, const Properties& properties, const DeviceFacts& device)
      : layers_(std::move(layers)), properties_(properties), device_(device) {}

  std::vector<Advice> advise() {
    const bool lowers = properties_.patch_torch_functions ||
                        is_16bit(properties_.cast_model_type.value_or(at::kFloat));
    if (lowers && device_.compute_capability < kTensorCores) {
      advise_on_missing_tensor_cores();
    } else if (lowers) {
      advise_on_bf16();
      advise_on_memory_format();
      advise_on_sizes();
    }
    advise_on_tf32(lowers);
    advise_on_cudnn();
    return std::move(advice_);
  }

 private:
  void add(const char* name, std::string text) { advice_.push_back({name, std::move(text)}); }

  bool stays_fp32(const Layer& layer) const {
    if (properties_.keep_batchnorm_fp32 && layer.is_marked_fp32) return true;
    if (!properties_.policy.has_value()) return false;
    const auto& globs = properties_.policy->fp32_param_globs();
    return std::any_of(globs.begin(), globs.end(), [&](const std::string& glob) {
      return fnmatch(glob.c_str(), layer.weight_name.c_str(), 0) == 0;
    });
  }

  template <typename Condition>
  std::vector<std::string> names_of(const Condition& condition) const {
    std::vector<std::string> names;
    for (const Layer& layer : layers_) {
      if (condition(layer)) names.push_back(quoted(layer));
    }
    return names;
  }

  void advise_on_missing_tensor_cores() {
    const int capability = device_.compute_capability;
    const ComputeCapability parts{capability / 10, capability % 10};
    const bool is_fp16 = properties_.dtype == at::kHalf;
    const bool is_slow = is_fp16 ? !computes_fp16_fast(parts) : !computes_bf16_fast(parts);
    add("tensor_cores",
        fmt::format("the GPU has compute capability {}, tensor cores begin at 7.0: products in {} "
                    "{} float32. Use O0 for speed; 16 bits save memory",
                    version(capability), dtype_name(properties_.dtype),
                    is_slow ? "are slower than in" : "gain little over"));
  }

  void advise_on_bf16() {
    if (properties_.dtype != at::kBFloat16 || device_.compute_capability >= kBfloat16) return;
    add("bf16", fmt::format("the GPU has compute capability {}, instructions for bfloat16 begin at "
                            "8.0: use float16, which its tensor cores multiply: "
                            "Options::dtype(torch::kHalf)",
                            version(device_.compute_capability)));
  }

  void advise_on_memory_format() {
    // Unset: initialize chooses. Any other format is the program's choice.
    if (properties_.memory_format != c10::MemoryFormat::Preserve) return;
    const auto names = names_of([&](const Layer& layer) {
      return layer.kind == Kind::convolution && layer.weight.dim() == 4 && !stays_fp32(layer) &&
             !layer.weight.is_contiguous(at::MemoryFormat::ChannelsLast);
    });
    if (names.empty()) return;
    add("memory_format",
        fmt::format("the weights of {} 2-d convolutions ({}) are not channels last, the format in "
                    "which tensor cores convolve: use Options::choose_memory_format(), or "
                    "memory_format(at::MemoryFormat::ChannelsLast)",
                    names.size(), list(names)));
  }

  static bool matters(const Layer& layer, const Layer::Size& size) {
    constexpr std::int64_t kSmallestProduct = 65536;
    constexpr std::int64_t kChannelsOfImages = 4;
    constexpr std::int64_t kSmallestVocabulary = 1000;
    switch (layer.kind) {
      case Kind::product:
        return layer.weight.numel() >= kSmallestProduct;
      case Kind::convolution:
        return size.value > kChannelsOfImages;
      case Kind::embedding:
        break;
    }
    return size.value >= kSmallestVocabulary;
  }

  void advise_on_sizes() {
    std::vector<std::string> found;
    for (const Layer& layer : layers_) {
      if (stays_fp32(layer)) continue;
      for (const Layer::Size& size : layer.sizes) {
        if (size.value % 8 != 0 && matters(layer, size))
          found.push_back(fmt::format("{} {} {}", quoted(layer), size.name, size.value));
      }
    }
    if (found.empty()) return;
    add("multiple_of_8",
        fmt::format("tensor cores are slower for sizes that are no multiple of 8: {}. Round them "
                    "up, and choose such a batch size (NVIDIA, Train With Mixed Precision)",
                    list(found)));
  }

  void advise_on_tf32(bool lowers) {
    if (device_.tf32_products || device_.compute_capability < kTf32) return;
    const auto names = names_of([&](const Layer& layer) {
      return layer.kind == Kind::product && (!lowers || stays_fp32(layer));
    });
    if (names.empty()) return;
    add("tf32",
        fmt::format("{} products stay in float32 ({}) and do not use TF32, in which tensor cores "
                    "multiply: if factors rounded to 10 bits of mantissa suffice, call "
                    "at::globalContext().setAllowTF32CuBLAS(true)",
                    names.size(), list(names)));
  }

  void advise_on_cudnn() {
    if (device_.cudnn_benchmark || properties_.cudnn.benchmark.has_value()) return;
    const auto names = names_of([](const Layer& layer) { return layer.kind == Kind::convolution; });
    if (names.empty()) return;
    add("cudnn_benchmark",
        fmt::format("cuDNN chooses the algorithms of {} convolutions ({}) without timing them: if "
                    "the sizes of batches rarely change, use Options::cudnn_benchmark(true)",
                    names.size(), list(names)));
  }

  std::vector<Layer> layers_;
  const Properties& properties_;
  const DeviceFacts& device_;
  std::vector<Advice> advice_;
};

bool computes_products_in_tf32(const at::Context& context) {
#if SEMITONE_LIBTORCH_SINCE(2, 10)
  return context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
#else
  return context.float32Precision("cuda", "matmul") == "tf32";
#endif
}

}  // namespace

DeviceFacts device_facts(c10::Device device) {
  DeviceFacts facts;
  facts.type = device.type();
  if (device.type() != c10::DeviceType::CUDA) return facts;
  const auto capability = compute_capability(std::max<int>(device.index(), 0));
  if (capability.has_value()) facts.compute_capability = 10 * capability->major + capability->minor;
  const at::Context& context = at::globalContext();
  facts.tf32_products = computes_products_in_tf32(context);
  facts.cudnn_benchmark = context.benchmarkCuDNN();
  return facts;
}

DeviceFacts facts_of(c10::DeviceType type, const std::vector<Model>& models) {
  if (type != c10::DeviceType::CUDA) return device_facts(type);
  for (const Model& model : models) {
    for (const ModelEntry& entry : entries_of(model)) {
      if (entry.tensor.device().type() == type) return device_facts(entry.tensor.device());
    }
  }
  return device_facts(type);
}

bool prefers_channels_last(const DeviceFacts& device) {
  return device.type == c10::DeviceType::CPU ||
         (device.type == c10::DeviceType::CUDA && device.compute_capability >= kTensorCores);
}

std::vector<Advice> advice(const std::vector<Model>& models, const Properties& properties,
                           const DeviceFacts& device) {
  if (!properties.enabled || device.type != c10::DeviceType::CUDA || device.compute_capability == 0)
    return {};
  std::vector<Layer> layers;
  for (std::size_t i = 0; i < models.size(); ++i) {
    for (Layer& layer : layers_of(models[i])) {
      if (models.size() > 1) layer.name = fmt::format("model {}: {}", i, layer.name);
      layers.push_back(std::move(layer));
    }
  }
  return Advisor(std::move(layers), properties, device).advise();
}

std::vector<Advice> advice(const Model& model, const Properties& properties) {
  return advice({model}, properties, facts_of(properties.device, {model}));
}

void log_advice(const std::vector<Advice>& advice) {
  if (!is_first_rank()) return;
  static std::mutex mutex;
  static std::set<std::string>& logged =
      *new std::set<std::string>;  // NOLINT(cppcoreguidelines-owning-memory)
  const std::scoped_lock lock(mutex);
  for (const Advice& one : advice) {
    if (logged.insert(one.text).second) log()->info("{}: {}", one.name, one.text);
  }
}

}  // namespace semitone::amp
