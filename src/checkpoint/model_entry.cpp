// Models and tensors: entries whose shapes are in the manifest.

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/autocast/model_entries.h"
#include "src/checkpoint/entry.h"
#include "src/core/archive.h"
#include "src/core/exact_weights.h"
#include "src/core/state_mode.h"
#include "src/core/utf8.h"
#include "src/kernels/multi_tensor_norm.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace semitone::checkpoint {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// A tensor that a MixedPrecision has cast to 16 bits is saved in fp32.
bool is_lowered(const at::Tensor& tensor) {
  return exact_weights_of(tensor) != nullptr;
}

TensorRecord record_of(const std::string& name, const at::Tensor& tensor) {
  // The manifest is JSON, which has no other text.
  if (!is_utf8(name)) throw Error("checkpoint", "names of tensors in UTF-8", "'" + name + "'");
  if (tensor.layout() != at::kStrided) {
    throw Error("checkpoint", "dense tensors",
                c10::str(name.empty() ? "one" : "'" + name + "'", " of layout ", tensor.layout()),
                "add its parts, such as indices() and values(), or to_dense()");
  }
  const bool is_lower = is_lowered(tensor) && is_16bit(tensor.scalar_type());
  return {name, tensor.sizes().vec(), dtype_name(is_lower ? at::kFloat : tensor.scalar_type())};
}

std::string describe(const TensorRecord& tensor) {
  return fmt::format("{} [{}]", tensor.dtype, fmt::join(tensor.shape, ", "));
}

std::string describe(const at::Tensor& tensor) {
  return describe(TensorRecord{"", tensor.sizes().vec(), dtype_name(tensor.scalar_type())});
}

void require_same_tensors(const std::vector<TensorRecord>& here,
                          const std::vector<TensorRecord>& saved, const std::string& path,
                          const char* remedy) {
  const auto by_name = [](const std::vector<TensorRecord>& tensors) {
    std::unordered_map<std::string, std::string> described;
    for (const TensorRecord& tensor : tensors) described.emplace(tensor.name, describe(tensor));
    return described;
  };
  const auto wanted = by_name(here);
  const auto found = by_name(saved);
  const auto require = [&](const TensorRecord& tensor) {
    const auto want = wanted.find(tensor.name);
    const auto got = found.find(tensor.name);
    const auto text = [](const auto& table, const auto& one) {
      return one == table.end() ? std::string("none") : one->second;
    };
    if (text(wanted, want) == text(found, got)) return;
    const std::string name = tensor.name.empty() ? "a tensor" : "'" + tensor.name + "'";
    throw FileError("checkpoint.resume",
                    fmt::format("{}, {}, in '{}'", name, text(wanted, want), path),
                    text(found, got), remedy);
  };
  for (const TensorRecord& tensor : here) require(tensor);
  for (const TensorRecord& tensor : saved) require(tensor);
}

// Copies values of the same shape. In an expanded tensor several elements have one place, which
// copy_() refuses.
void copy_values(const at::Tensor& to, const at::Tensor& from) {
  at::Tensor places = to.detach();
  at::Tensor values = from;
  for (std::int64_t d = 0; d < places.dim(); ++d) {
    if (places.stride(d) != 0 || places.size(d) < 2) continue;
    places = places.narrow(d, 0, 1);
    values = values.narrow(d, 0, 1);
  }
  places.copy_(values);
}

// LibTorch saves memory once, with the dtype of the first tensor that is in it.
void require_one_dtype_in_memory(const std::vector<amp::ModelEntry>& entries) {
  std::unordered_map<const void*, const amp::ModelEntry*> first_in;
  for (const auto& entry : entries) {
    if (!entry.tensor.has_storage() || entry.tensor.storage().data() == nullptr) continue;
    const auto* const first =
        first_in.try_emplace(entry.tensor.storage().data(), &entry).first->second;
    if (first->tensor.scalar_type() == entry.tensor.scalar_type()) continue;
    throw Error(
        "checkpoint", "tensors of one dtype in the same memory",
        fmt::format("'{}' ({}) and '{}' ({})", first->name, dtype_name(first->tensor.scalar_type()),
                    entry.name, dtype_name(entry.tensor.scalar_type())),
        "give one of them memory of its own, with clone(), or register only one of them");
  }
}

// What a __getstate__ of a module returns, only its code can read, and the code in a checkpoint does
// not run.
void require_own_tensors(const torch::jit::Module& script) {
  for (const torch::jit::Module& module : script.modules()) {
    const bool has_tensors = module.parameters().size() > 0 || module.buffers().size() > 0;
    if (!has_tensors || !module.find_method("__getstate__").has_value()) continue;
    throw Error("checkpoint", "TorchScript modules whose tensors are saved as they are",
                fmt::format("__getstate__ in '{}'", module.type()->name()->qualifiedName()),
                "remove it and __setstate__ from the module");
  }
}

// Module::load() gives a tensor the memory of the file's tensor. Others may refer to its own memory
// (captured graphs, views), so the values are copied there.
class OwnMemory {
 public:
  // Tensors on other devices than the file's have an empty one on that device meanwhile: set_data(),
  // which load() uses for them, would drop the hooks on their gradients.
  OwnMemory(const std::vector<amp::ModelEntry>& entries, c10::Device device) {
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const auto& entry : entries) {
      if (!seen.insert(entry.tensor.unsafeGetTensorImpl()).second) continue;  // tied
      kept_.emplace_back(entry.tensor, entry.tensor.variable_data());
      if (entry.tensor.device() != device)
        set_memory(entry.tensor, at::empty({0}, entry.tensor.options().device(device)));
    }
  }

  // Returns the tensors to their memory, with the values that they have.
  void take_values() {
    const at::NoGradGuard no_grad;
    for (auto& [tensor, memory] : kept_) {
      const at::Tensor loaded = tensor.variable_data();
      // copy_values() would repeat a single number, and convert to another dtype.
      const std::string want = describe(memory);
      const std::string got = describe(loaded);
      if (got != want) throw FileError("checkpoint.resume", "a tensor of " + want, got);
      set_memory(tensor, memory);
      copy_values(tensor, loaded);
    }
  }

  // Returns them to their memory, with the values from before.
  void restore() {
    for (auto& [tensor, memory] : kept_) set_memory(tensor, memory);
  }

 private:
  static void set_memory(const at::Tensor& tensor, const at::Tensor& memory) {
    tensor.unsafeGetTensorImpl()->shallow_copy_from(memory.getIntrusivePtr());
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

class ModelEntry final : public Entry {
 public:
  ModelEntry(std::string name, const amp::Model& model,
             std::shared_ptr<const MixedPrecisions> mixed)
      : Entry(std::move(name), model.script() == nullptr ? "module" : "script", PerRank::no,
              Turn::model),
        model_(model),
        mixed_(std::move(mixed)) {}

  std::vector<c10::Device> devices() const override {
    std::vector<c10::Device> devices;
    for (const auto& entry : amp::entries_of(model_)) devices.push_back(entry.tensor.device());
    return devices;
  }

  std::string nonfinite_weight() const override {
    std::vector<std::string> names;
    std::vector<at::Tensor> weights;
    for (const auto& entry : amp::entries_of(model_)) {
      const at::Tensor weight = entry.tensor.detach();
      const bool is_dense = weight.defined() && weight.layout() == at::kStrided;
      if (!entry.is_parameter || !entry.tensor.requires_grad() || !is_dense) continue;
      if (!weight.is_floating_point() && !weight.is_complex()) continue;
      names.push_back(entry.name);
      weights.push_back(weight.is_complex() ? at::view_as_real(weight.resolve_conj()) : weight);
    }
    const std::vector<double> largest =
        kernels::multi_tensor_norms(weights, std::numeric_limits<double>::infinity());
    const auto found = std::ranges::find_if_not(largest, [](double x) { return std::isfinite(x); });
    if (found == largest.end()) return {};
    return fmt::format("{} in '{}' of '{}'", std::isnan(*found) ? "NaN" : "inf",
                       names[static_cast<std::size_t>(found - largest.begin())], name());
  }

  void save(FileRecord& record, const UseArchive& use) override {
    const auto entries = amp::entries_of(model_);
    record.tensors = records_of(entries);
    require_one_dtype_in_memory(entries);
    auto fp32 = fp32_weights(entries);
    // The forward pass changes buffers: running means, for example.
    const auto is_steady = [parameters =
                                storages_of_parameters(entries)](const c10::Storage& storage) {
      return parameters.contains(storage.data());
    };
    if (const auto* const script = model_.script()) {
      require_own_tensors(*script);
      Archive content(*script);
      content.set_steady(is_steady);
      use(content);
    } else {
      OutputArchive archive;
      model_.module()->save(archive);
      use_content(archive, use, is_steady);
    }
    if (fp32.has_value()) fp32->discard();
  }

  void require_fits(const FileRecord& record, const std::string& path) const override {
    require_same_tensors(records_of(amp::entries_of(model_)), record.tensors, path,
                         "resume with the model of the saved run, or choose another directory");
  }

  void read(const Source& source, const FileRecord&) override {
    auto fp32 = fp32_weights(amp::entries_of(model_));
    if (model_.script() == nullptr) {
      read_module(source);
    } else {
      read_script(source);
    }
    if (fp32.has_value()) fp32->end();
  }

 private:
  static std::vector<TensorRecord> records_of(const std::vector<amp::ModelEntry>& entries) {
    std::vector<TensorRecord> records;
    records.reserve(entries.size());
    for (const auto& entry : entries) records.push_back(record_of(entry.name, entry.tensor));
    return records;
  }

  // Without those of buffers.
  static std::unordered_set<const void*> storages_of_parameters(
      const std::vector<amp::ModelEntry>& entries) {
    std::unordered_set<const void*> storages;
    for (const auto& entry : entries) {
      if (entry.is_parameter && entry.tensor.has_storage())
        storages.insert(entry.tensor.storage().data());
    }
    for (const auto& entry : entries) {
      if (!entry.is_parameter && entry.tensor.has_storage())
        storages.erase(entry.tensor.storage().data());
    }
    return storages;
  }

  // Nothing if no MixedPrecision has cast the model.
  std::optional<amp::MixedPrecision::Fp32Weights> fp32_weights(
      const std::vector<amp::ModelEntry>& entries) const {
    if (std::none_of(entries.begin(), entries.end(),
                     [](const auto& entry) { return is_lowered(entry.tensor); }))
      return std::nullopt;
    std::vector<std::string> reasons;
    for (amp::MixedPrecision* const mixed : *mixed_) {
      try {
        return mixed->fp32_weights(model_);
      } catch (const Error& error) {
        if (mixed_->size() == 1) throw;
        reasons.emplace_back(error.what());  // usually that it manages other models
      }
    }
    throw Error(
        "checkpoint",
        fmt::format("the MixedPrecision that amp::initialize returned for model '{}'", name()),
        reasons.empty() ? "none" : fmt::format("{}", fmt::join(reasons, "; ")),
        "call add(\"mixed\", mixed) as well: it has the exact weights");
  }

  void read_module(const Source& source) {
    torch::nn::Module& module = *model_.module();
    const auto entries = amp::entries_of(model_);
    // Not the whole model on one of its devices, whose memory may not suffice.
    const auto elsewhere = [&](const amp::ModelEntry& entry) {
      return entry.tensor.device() != entries.front().tensor.device();
    };
    const c10::Device device = entries.empty() || std::ranges::any_of(entries, elsewhere)
                                   ? c10::kCPU
                                   : entries.front().tensor.device();
    InputArchive archive = source.archive(device);
    OwnMemory memory(entries, device);
    try {
      module.load(archive);
      memory.take_values();
    } catch (...) {
      memory.restore();
      throw;
    }
  }

  void read_script(const Source& source) {
    const auto entries = amp::entries_of(model_);
    if (entries.empty()) return;
    std::unordered_set<std::string> names;
    for (const auto& entry : entries) names.insert(entry.name);
    const auto loaded = source.tensors_of_script(names);
    const at::NoGradGuard no_grad;
    for (const auto& entry : entries) {
      const auto found = loaded.find(entry.name);
      if (found == loaded.end()) {
        throw FileError("checkpoint.resume", fmt::format("'{}' in '{}'", entry.name, source.text()),
                        "no such tensor");
      }
      copy_values(entry.tensor, found->second);
    }
  }

  amp::Model model_;
  std::shared_ptr<const MixedPrecisions> mixed_;
};

class TensorEntry final : public Entry {
 public:
  TensorEntry(std::string name, at::Tensor& tensor, PerRank per_rank)
      : Entry(std::move(name), "tensor", per_rank), tensor_(tensor) {}

  void save(FileRecord& record, const UseArchive& use) override {
    OutputArchive archive;
    if (tensor_.defined()) {
      record.tensors = {record_of("", tensor_)};
      // LibTorch writes the whole memory of a view.
      const at::Tensor value = tensor_.detach();
      const bool is_small_part =
          value.has_storage() && value.storage().nbytes() > 2 * value.nbytes();
      archive.write(kKey, is_small_part ? value.clone() : value);
    }
    use_content(archive, use);
  }

  void require_fits(const FileRecord& record, const std::string& path) const override {
    if (!tensor_.defined()) return;
    require_same_tensors({record_of("", tensor_)}, record.tensors, path,
                         "make it undefined before resume(): tensor = at::Tensor()");
  }

  void read(const Source& source, const FileRecord&) override {
    const StateMode mode;
    InputArchive archive = source.archive();
    const auto loaded = find_value<at::Tensor>(archive, kKey, "checkpoint.resume");
    if (tensor_.defined() && loaded.has_value()) {
      const c10::InferenceMode as_the_tensor(tensor_.is_inference());
      const at::NoGradGuard no_grad;
      copy_values(tensor_, *loaded);
    } else {
      tensor_ = loaded.value_or(at::Tensor());
    }
  }

 private:
  static constexpr auto kKey = "value";
  at::Tensor& tensor_;
};

}  // namespace

std::unique_ptr<Entry> model_entry(std::string name, const amp::Model& model,
                                   std::shared_ptr<const MixedPrecisions> mixed) {
  return std::make_unique<ModelEntry>(std::move(name), model, std::move(mixed));
}

std::unique_ptr<Entry> tensor_entry(std::string name, at::Tensor& tensor, PerRank per_rank) {
  return std::make_unique<TensorEntry>(std::move(name), tensor, per_rank);
}

}  // namespace semitone::checkpoint
