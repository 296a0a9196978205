#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/weights/file.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/autocast/model_entries.h"
#include "src/core/archive.h"
#include "src/core/file.h"
#include "src/core/log.h"
#include "src/core/state_mode.h"
#include "src/scaling/same_memory.h"

#include <torch/serialize.h>
#include <torch/types.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

// Gives a tensor other memory, dtype and shape. Not set_data(), which at a change of dtype drops
// the node that accumulates the tensor's gradient, and with it the hooks of data-parallel training.
void lend(const at::Tensor& tensor, const at::Tensor& data) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

// "growth_interval 500 (here 2000), …": what a saved run had, where it differs.
std::string differences(const LossScaleOptions& here, const LossScaleOptions& saved) {
  std::vector<std::string> all;
  const auto compare = [&all](const char* name, auto own, auto other) {
    if (own != other) all.push_back(fmt::format("{} {} (here {})", name, other, own));
  };
  compare("dynamic", here.dynamic(), saved.dynamic());
  if (!saved.dynamic()) compare("scale", here.init_scale(), saved.init_scale());
  compare("growth_factor", here.growth_factor(), saved.growth_factor());
  compare("backoff_factor", here.backoff_factor(), saved.backoff_factor());
  compare("growth_interval", here.growth_interval(), saved.growth_interval());
  compare("growth_delay", here.growth_delay(), saved.growth_delay());
  compare("min_scale", here.min_scale(), saved.min_scale());
  compare("max_scale", here.max_scale(), saved.max_scale());
  compare("hysteresis", here.hysteresis(), saved.hysteresis());
  compare("overflow_count", static_cast<int>(here.overflow_count()),
          static_cast<int>(saved.overflow_count()));
  compare("scale_dtype", dtype_name(here.scale_dtype()), dtype_name(saved.scale_dtype()));
  return fmt::format("{}", fmt::join(all, ", "));
}

}  // namespace

struct MixedPrecision::Fp32Weights::Saved {
  struct Item {
    std::string name;
    at::Tensor tensor;  // of the model
    at::Tensor low;     // its 16-bit memory
    Masters* masters;   // where its fp32 value belongs; null where it has no master
  };
  Impl* mixed;
  std::vector<Item> items;
};

MixedPrecision::Fp32Weights::Fp32Weights(std::unique_ptr<Saved> saved) : saved_(std::move(saved)) {}
MixedPrecision::Fp32Weights::Fp32Weights(Fp32Weights&&) noexcept = default;

MixedPrecision::Fp32Weights::~Fp32Weights() {
  try {
    end();
  } catch (const std::exception& error) {
    log()->error(error.what());
  }
}

void MixedPrecision::Fp32Weights::end() {
  if (saved_ == nullptr) return;
  const auto saved = std::move(saved_);
  const StateMode mode(saved->mixed->inference_tensors);
  --saved->mixed->fp32_scopes;
  std::string misfit;
  for (const Saved::Item& item : saved->items) {
    const at::Tensor value = item.tensor.variable_data();
    lend(item.tensor, item.low);
    if (value.sizes() != item.low.sizes()) {
      misfit = c10::str(value.sizes(), " for '", item.name, "' of shape ", item.low.sizes());
    } else if (item.masters != nullptr) {
      item.masters->set(item.tensor, value);
    } else {
      item.tensor.copy_(value);
    }
  }
  if (!misfit.empty()) {
    throw Error("amp.mixed_precision.fp32_weights", "weights of the model's shapes", misfit,
                "the other weights were taken over");
  }
}

void MixedPrecision::Fp32Weights::discard() {
  if (saved_ == nullptr) return;
  const auto saved = std::move(saved_);
  --saved->mixed->fp32_scopes;
  for (const Saved::Item& item : saved->items) lend(item.tensor, item.low);
}

MixedPrecision::Fp32Weights MixedPrecision::fp32_weights(const Model& model) {
  const StateMode mode(impl().inference_tensors);
  const Model& given = impl().of(model.identity(), "fp32_weights");
  if (impl().fp32_scopes == 0) impl().sync("fp32_weights");
  auto saved = std::make_unique<Fp32Weights::Saved>();
  saved->mixed = &impl();
  std::vector<Fp32Weights::Saved::Item>& items = saved->items;
  ++impl().fp32_scopes;
  Fp32Weights scope(std::move(saved));  // ends if a cast throws

  const auto find = [&](const at::Tensor& tensor) -> std::pair<Masters*, at::Tensor> {
    if (Masters* const masters = impl().masters_of(tensor))
      return {masters, masters->master_of(tensor)};
    // Tensors that share memory still share it afterwards.
    for (const auto& item : items) {
      if (same_memory(item.low, tensor)) return {nullptr, item.tensor};
    }
    return {nullptr, tensor.detach().to(at::kFloat)};
  };
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const ModelEntry& entry : entries_of(given)) {
    const at::Tensor& tensor = entry.tensor;
    if (!is_16bit(tensor.scalar_type()) || !seen.insert(tensor.unsafeGetTensorImpl()).second) {
      continue;
    }
    const auto [masters, value] = find(tensor);
    items.push_back({entry.name, tensor, tensor.variable_data(), masters});
    lend(tensor, value);
  }
  return scope;
}

void MixedPrecision::save_model(const Model& model, const std::string& path) {
  std::ostringstream stream;
  {
    auto fp32 = fp32_weights(model);
    if (const auto* script = model.script()) {
      script->save(stream);
    } else {
      torch::serialize::OutputArchive archive;
      model.module()->save(archive);
      archive.save_to(stream);
    }
    fp32.discard();
  }
  write_file(path, std::move(stream).str(), "amp.mixed_precision.save_model");
}

void MixedPrecision::load_model(const Model& model, const std::string& path) {
  const StateMode mode(impl().inference_tensors);
  // Not Module::load(): LibTorch 2.11 gives a parameter the bytes of a tensor of another dtype, and
  // accepts any shape. This sets the masters.
  weights::load(impl().of(model.identity(), "load_model"), path);
}

void MixedPrecision::save(torch::serialize::OutputArchive& archive) const {
  const bool scaled = std::any_of(impl().optimizers.begin(), impl().optimizers.end(),
                                  [](const auto& record) { return record.scaled.has_value(); });
  const bool pending = std::any_of(impl().pending.begin(), impl().pending.end(),
                                   [](const auto& one) { return one.named; });
  if (scaled || pending) {
    throw Error("amp.mixed_precision.save", "a call between two iterations",
                "one between scale_loss and step",
                "save after step(), or drop the gradients with zero_grad() before");
  }
  impl().settle();
  if (impl().fp32_scopes == 0) impl().pull("save");
  const Properties& properties = impl().properties;
  archive.write("opt_level", c10::IValue(std::string(name_of(properties.opt_level))));
  archive.write("dtype", c10::IValue(dtype_name(properties.dtype)));
  archive.write("models", c10::IValue(static_cast<std::int64_t>(impl().models.size())));
  archive.write("losses", c10::IValue(static_cast<std::int64_t>(impl().scalers.size())));
  archive.write("optimizers", c10::IValue(static_cast<std::int64_t>(impl().optimizers.size())));
  for (std::size_t i = 0; i < impl().scalers.size(); ++i) {
    torch::serialize::OutputArchive scaler;
    impl().scalers[i].save(scaler);
    archive.write("loss" + std::to_string(i), scaler);
  }
  if (impl().has_fp8()) {
    torch::serialize::OutputArchive fp8;
    impl().policy->fp8_scaling().save(fp8);
    archive.write("fp8", fp8);
  }
  for (std::size_t i = 0; i < impl().optimizers.size(); ++i) {
    // A loss that was scaled for several optimizers overflowed, and this one has not stepped since.
    if (impl().optimizers[i].skip) archive.write("skip" + std::to_string(i), c10::IValue(true));
    if (!impl().optimizers[i].masters.has_value()) continue;
    torch::serialize::OutputArchive masters;
    impl().optimizers[i].masters->save(masters);
    archive.write("masters" + std::to_string(i), masters);
  }
}

void MixedPrecision::load(torch::serialize::InputArchive& archive) {
  constexpr auto kComponent = "amp.mixed_precision.load";
  const Properties& properties = impl().properties;
  const auto must_be = [&](const std::string& what, const std::string& here,
                           const std::string& saved) {
    if (here != saved)
      throw FileError(kComponent, what + " " + here, saved,
                      "call initialize with the options of the saved run");
  };
  must_be("opt level", std::string(name_of(properties.opt_level)),
          read_value<std::string>(archive, "opt_level", kComponent));
  if (properties.cast_model_type.has_value() || properties.patch_torch_functions) {
    must_be("dtype", dtype_name(properties.dtype),
            read_value<std::string>(archive, "dtype", kComponent));
  }
  const auto must_be_as_many = [&](const std::string& what, std::size_t here) {
    must_be("number of " + what, std::to_string(here),
            std::to_string(read_value<std::int64_t>(archive, what, kComponent)));
  };
  must_be_as_many("models", impl().models.size());
  must_be_as_many("losses", impl().scalers.size());
  must_be_as_many("optimizers", impl().optimizers.size());
  const auto part = [&](const std::string& key,
                        const std::string& remedy = "is the file complete?") {
    torch::serialize::InputArchive inner;
    if (!archive.try_read(key, inner))
      throw FileError(kComponent, "'" + key + "' in the archive", "none", remedy);
    return inner;
  };
  // Values from torch::load first: the memory that it leaves would be read as theirs once more.
  if (impl().fp32_scopes == 0) impl().take_loaded("load");
  impl().find_shared_parameters("load");
  // Everything is read before anything else is changed.
  impl().settle();
  std::vector<std::vector<at::Tensor>> masters(impl().optimizers.size());
  for (std::size_t i = 0; i < masters.size(); ++i) {
    if (!impl().optimizers[i].masters.has_value()) continue;
    auto inner = part("masters" + std::to_string(i),
                      "if the saved run had master_weights(false), set it here too, or resume at "
                      "another opt level");
    masters[i] = impl().optimizers[i].masters->read(inner);
  }
  // After the masters, which may not fit: listeners hear of loaded scales at once.
  std::vector<LossScaler> scalers = impl().scalers;
  for (std::size_t i = 0; i < scalers.size(); ++i) {
    auto inner = part("loss" + std::to_string(i));
    const LossScaleOptions own = scalers[i].options();
    scalers[i].load(inner);
    // A limit of this program's, which does not change the training.
    scalers[i].set_options(
        LossScaleOptions(scalers[i].options()).max_consecutive_skips(own.max_consecutive_skips()));
    if (const auto text = differences(own, scalers[i].options()); !text.empty())
      log()->warn("{}: loss scale {} keeps the options of the saved run: {}", kComponent, i, text);
  }
  if (impl().has_fp8()) {
    torch::serialize::InputArchive fp8;
    if (archive.try_read("fp8", fp8)) {
      impl().policy->fp8_scaling().load(fp8);
    } else {
      log()->warn("{}: the saved run had no fp8(), so the scales of fp8 begin anew", kComponent);
    }
  }
  // Not the vector itself: loss_scaler() has returned references.
  std::ranges::move(scalers, impl().scalers.begin());
  for (std::size_t i = 0; i < masters.size(); ++i) {
    auto& record = impl().optimizers[i];
    if (record.masters.has_value()) record.masters->assign(masters[i]);
    zero_grad(*record.optimizer);
    c10::IValue skip;
    record.skip = archive.try_read("skip" + std::to_string(i), skip);
  }
}

}  // namespace semitone::amp
