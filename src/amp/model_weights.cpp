#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/rank.h"
#include "src/autocast/model_entries.h"
#include "src/core/exact_weights.h"
#include "src/core/log.h"
#include "src/core/state_mode.h"
#include "src/scaling/same_memory.h"

#include <ATen/EmptyTensor.h>
#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

// The weights of a MixedPrecision's models, the masters, and what a program has changed in them.

namespace semitone::amp {
namespace {

using LowTensor = MixedPrecision::Impl::LowTensor;

// The ratio of a tensor's memory to what it needs, 1, 2, 4 …, where more than 1 means a wider
// dtype. 0: another size.
std::size_t times_its_memory(const LowTensor& low) {
  const at::Tensor& tensor = low.tensor;
  if (!tensor.has_storage() || tensor.storage_offset() != 0 || tensor.numel() == 0) return 0;
  if (!is_16bit(tensor.scalar_type()) || tensor.sizes() != low.sizes) return 0;
  const std::size_t bytes = tensor.storage().nbytes();
  const std::size_t own =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  return bytes % own == 0 ? bytes / own : 0;
}

// Whether its storage also has elements that are another of these tensors: a flat buffer of several
// parameters, as torch::nn::utils::vector_to_parameters leaves it.
bool is_part_of_buffer(const LowTensor& low, const std::vector<LowTensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const LowTensor& other) {
    return other.tensor.has_storage() && other.tensor.is_alias_of(low.tensor) &&
           (other.tensor.storage_offset() != 0 || other.tensor.numel() != low.tensor.numel());
  });
}

// The tensors that have the memory of a wider dtype.
std::vector<const LowTensor*> find_loaded(const std::vector<LowTensor>& tensors) {
  std::vector<const LowTensor*> loaded;
  for (const LowTensor& low : tensors) {
    const at::Tensor& tensor = low.tensor;
    if (tensor.has_storage() && tensor.storage().nbytes() <= tensor.nbytes()) continue;
    const std::size_t times = times_its_memory(low);
    if ((times == 2 || times == 4) && !is_part_of_buffer(low, tensors)) loaded.push_back(&low);
  }
  return loaded;
}

// Error if a tensor's memory belongs to anything but these tensors.
void require_own_memory(const LowTensor& low, const std::vector<LowTensor>& tensors,
                        const char* caller) {
  const c10::StorageImpl* const storage = low.tensor.storage().unsafeGetStorageImpl();
  std::unordered_set<const c10::TensorImpl*> sharing;
  for (const LowTensor& other : tensors) {
    if (other.tensor.has_storage() && other.tensor.storage().unsafeGetStorageImpl() == storage)
      sharing.insert(other.tensor.unsafeGetTensorImpl());
  }
  if (low.tensor.storage().use_count() <= sharing.size()) return;
  throw Error(std::string("amp.mixed_precision.") + caller,
              dtype_name(low.tensor.scalar_type()) + " memory of its own for '" + low.name + "'",
              "shared memory of a wider dtype's size, as torch::load of an fp32 file leaves it",
              "load with mixed.load_model(model, path), or inside mixed.fp32_weights(model)");
}

}  // namespace

// Masters as seen by other rooms.
class MixedPrecision::Impl::Exact final : public ExactWeights {
 public:
  explicit Exact(Impl& mixed) : mixed_(&mixed) {}

  std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& parameters) const override {
    std::vector<at::Tensor> values(parameters.size());
    if (mixed_ == nullptr) return values;
    mixed_->pull("exact_weights");
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const Masters* const masters = mixed_->masters_of(parameters[i]);
      if (masters != nullptr) values[i] = masters->master_of(parameters[i]);
    }
    return values;
  }

  void set(const at::Tensor& parameter, const at::Tensor& value) override {
    Masters* const masters = mixed_ == nullptr ? nullptr : mixed_->masters_of(parameter);
    if (masters != nullptr) masters->set(parameter, value);
  }

  void detach() { mixed_ = nullptr; }

 private:
  Impl* mixed_;
};

void MixedPrecision::Impl::announce_exact_weights() {
  exact = std::make_shared<Exact>(*this);
  list_low_tensors();
}

void MixedPrecision::Impl::withdraw_exact_weights() {
  if (exact == nullptr) return;
  exact->detach();
  for (const LowTensor& low : low_tensors) withdraw_exact_weight(low.tensor, exact.get());
}

void MixedPrecision::Impl::list_low_tensors() {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const LowTensor& low : low_tensors) seen.insert(low.tensor.unsafeGetTensorImpl());
  for (const WideTensor& wide : wide_tensors) {
    if (wide.impl.use_count() > 0) seen.insert(wide.impl._unsafe_get_target());
  }
  for (const Model& model : models) {
    for (const ModelEntry& entry : entries_of(model)) {
      const at::Tensor& tensor = entry.tensor;
      if (!is_16bit(tensor.scalar_type()) || !seen.insert(tensor.unsafeGetTensorImpl()).second)
        continue;
      low_tensors.push_back(
          {entry.name, tensor, c10::DimVector(tensor.sizes()), tensor.scalar_type()});
      announce_exact_weight(tensor, exact);
    }
  }
}

// A parameter that was moved from one optimizer to another has a master in both for a while.
Masters* MixedPrecision::Impl::masters_of(const at::Tensor& parameter) {
  for (const auto counts : {&Masters::trains, &Masters::has}) {
    for (OptimizerRecord& record : optimizers) {
      if (record.masters.has_value() && ((*record.masters).*counts)(parameter))
        return &*record.masters;
    }
  }
  return nullptr;
}

void MixedPrecision::Impl::take_loaded(const char* caller) {
  const std::vector<const LowTensor*> loaded = find_loaded(low_tensors);
  if (loaded.empty()) return;
  const StateMode mode(inference_tensors);
  for (const LowTensor* low : loaded) require_own_memory(*low, low_tensors, caller);
  convert_loaded(loaded);
  if (properties.verbosity >= 1 && is_first_rank()) {
    log()->info(
        "converted fp32 values that torch::load put into {} tensors of the model, the first is "
        "'{}'",
        loaded.size(), loaded.front()->name);
  }
}

void MixedPrecision::Impl::convert_loaded(const std::vector<const LowTensor*>& loaded) {
  // What was loaded, and the tensor that has it now.
  std::vector<std::pair<at::Tensor, at::Tensor>> before;
  for (const LowTensor* low : loaded) {
    const at::Tensor& tensor = low->tensor;
    const bool is_double = times_its_memory(*low) == 4;
    const auto twin = std::find_if(before.begin(), before.end(), [&](const auto& earlier) {
      return same_memory(earlier.first, tensor);
    });
    const at::Tensor loaded_as = tensor.variable_data();
    const at::Tensor value =
        at::empty({0}, tensor.options().dtype(is_double ? at::kDouble : at::kFloat))
            .set_(tensor.storage(), 0, tensor.sizes(), tensor.strides());
    tensor.set_data(twin == before.end() ? value.to(tensor.scalar_type())
                                         : twin->second.variable_data());
    if (Masters* const masters = masters_of(tensor)) masters->set(tensor, value);
    before.emplace_back(loaded_as, tensor);
  }
}

void MixedPrecision::Impl::require_own_dtypes(const char* caller) const {
  if (fp32_scopes > 0) {
    throw Error(std::string("amp.mixed_precision.") + caller, "a call outside of fp32_weights()",
                "one while the weights are fp32", "end the scope of fp32_weights() first");
  }
}

void MixedPrecision::Impl::require_dtypes_as_left(const char* caller) const {
  const auto refuse = [caller](const std::string& name, c10::ScalarType left,
                               c10::ScalarType found) {
    throw Error(std::string("amp.mixed_precision.") + caller,
                "'" + name + "' in " + dtype_name(left) + ", as initialize left it",
                dtype_name(found),
                "leave the model's dtypes to amp::initialize: cast a copy, or before it; for fp32 "
                "weights to save or export take mixed.fp32_weights(model)");
  };
  for (const WideTensor& wide : wide_tensors) {
    if (wide.impl.use_count() == 0) continue;
    const auto dtype = c10::typeMetaToScalarType(wide.impl._unsafe_get_target()->dtype());
    if (dtype != at::kFloat) refuse(wide.name, at::kFloat, dtype);
  }
  for (const LowTensor& low : low_tensors) {
    const auto dtype = low.tensor.scalar_type();
    if (dtype != low.dtype && dtype != at::kFloat) refuse(low.name, low.dtype, dtype);
  }
}

void MixedPrecision::Impl::pull(const char* caller) {
  require_own_dtypes(caller);
  find_shared_parameters(caller);
  take_loaded(caller);
  for (OptimizerRecord& record : optimizers) {
    if (record.masters.has_value()) record.masters->pull();
  }
}

void MixedPrecision::Impl::sync(const char* caller) {
  require_own_dtypes(caller);
  require_dtypes_as_left(caller);
  find_shared_parameters(caller);
  take_loaded(caller);
  for (OptimizerRecord& record : optimizers) {
    if (record.masters.has_value()) record.masters->sync();
  }
}

}  // namespace semitone::amp
