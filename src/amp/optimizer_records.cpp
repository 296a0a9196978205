#include "semitone/core/error.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/autocast/model_entries.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

// Finds the MixedPrecision that has an optimizer, among all of the process.
struct Owners {
  std::mutex mutex;
  std::unordered_multimap<const torch::optim::Optimizer*, MixedPrecision::Impl*> by_optimizer;

  // Never destroyed, since a MixedPrecision may be destroyed later.
  static Owners& instance() {
    static auto* const owners = new Owners;
    return *owners;
  }
};

}  // namespace

MixedPrecision::Impl::OptimizerRecord& MixedPrecision::Impl::of(
    const torch::optim::Optimizer& optimizer, const char* caller) {
  for (OptimizerRecord& record : optimizers) {
    if (record.optimizer == &optimizer) return record;
  }
  throw Error(std::string("amp.mixed_precision.") + caller,
              "an optimizer that was given to amp::initialize", "another one",
              "name every optimizer in initialize({model}, {optimizer, …})");
}

void MixedPrecision::Impl::find_shared_parameters(const char* caller) {
  std::vector<const c10::TensorImpl*> parameters;
  for (const OptimizerRecord& record : optimizers) {
    for_each_parameter(*record.optimizer, [&](std::size_t, std::size_t, const at::Tensor& each) {
      parameters.push_back(each.unsafeGetTensorImpl());
    });
    parameters.push_back(nullptr);
  }
  if (parameters_seen == parameters) return;
  if (exact != nullptr) list_low_tensors();  // null without mixed precision
  pass_on_masters();
  std::unordered_map<const c10::TensorImpl*, OptimizerRecord*> owners;
  for (std::size_t i = 0; i < optimizers.size(); ++i) optimizers[i].component = i;
  for (OptimizerRecord& record : optimizers) {
    record.for_each_leaf([&](const at::Tensor& leaf) {
      const OptimizerRecord& owner =
          *owners.try_emplace(leaf.unsafeGetTensorImpl(), &record).first->second;
      if (&owner == &record) return;
      if (record.masters.has_value()) {
        throw Error(std::string("amp.mixed_precision.") + caller,
                    "every parameter in one optimizer where there are master weights",
                    "one that was added to a second optimizer",
                    "a parameter has one master: make it one optimizer with two groups, or use O1");
      }
      const std::size_t merged = record.component;
      for (OptimizerRecord& one : optimizers) {
        if (one.component == merged) one.component = owner.component;
      }
    });
  }
  parameters_seen = std::move(parameters);
}

// Where a program has taken parameters from one optimizer and given them to another.
void MixedPrecision::Impl::pass_on_masters() {
  // A group that was given away has the masters of the first optimizer.
  for (OptimizerRecord& record : optimizers) {
    for_each_parameter(*record.optimizer, [&](std::size_t, std::size_t, at::Tensor& place) {
      for (const OptimizerRecord& other : optimizers) {
        if (&other == &record || !other.masters.has_value()) continue;
        if (const at::Tensor moved = other.masters->parameter_of(place); moved.defined())
          place = moved;
      }
    });
  }
  for (OptimizerRecord& record : optimizers)
    if (record.masters.has_value()) record.masters->follow_groups();
  for (OptimizerRecord& record : optimizers) {
    if (!record.masters.has_value()) continue;
    Masters::ExactValues values;
    record.for_each_without_master([&](const at::Tensor& parameter) {
      for (const OptimizerRecord& other : optimizers) {
        if (&other == &record || !other.masters.has_value() || other.masters->trains(parameter))
          continue;
        if (const at::Tensor master = other.masters->master_of(parameter); master.defined())
          values.emplace(parameter.unsafeGetTensorImpl(), master.detach().clone());
      }
    });
    if (!values.empty()) record.masters->adopt(values);
  }
}

void MixedPrecision::Impl::find_free_parameters() {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const OptimizerRecord& record : optimizers) {
    record.for_each_leaf([&](const at::Tensor& leaf) { seen.insert(leaf.unsafeGetTensorImpl()); });
  }
  free_parameters.clear();
  for (const Model& model : models) {
    for (const ModelEntry& entry : entries_of(model)) {
      if (entry.is_parameter && seen.insert(entry.tensor.unsafeGetTensorImpl()).second)
        free_parameters.push_back(entry.tensor);
    }
  }
}

// A backward pass that computes a forward again does not use the object for something else.
void MixedPrecision::Impl::note_use() {
  used_by = std::this_thread::get_id();
  if (!in_backward_pass()) ++uses;
}

bool MixedPrecision::Impl::in_backward_pass() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

void MixedPrecision::Impl::own_optimizers() {
  Owners& owners = Owners::instance();
  const std::lock_guard lock(owners.mutex);
  for (const OptimizerRecord& record : optimizers)
    owners.by_optimizer.emplace(record.optimizer, this);
}

void MixedPrecision::Impl::disown_optimizers() {
  Owners& owners = Owners::instance();
  const std::lock_guard lock(owners.mutex);
  std::erase_if(owners.by_optimizer, [this](const auto& entry) { return entry.second == this; });
}

// The optimizer itself tells whether it has masters: another one may have had its address.
void MixedPrecision::Impl::require_no_owner(const OptimizerRefs& optimizers) {
  Owners& owners = Owners::instance();
  const std::lock_guard lock(owners.mutex);
  for (torch::optim::Optimizer& optimizer : optimizers) {
    const auto [first, last] = owners.by_optimizer.equal_range(&optimizer);
    for (auto entry = first; entry != last; ++entry) {
      const auto& masters = entry->second->of(optimizer, "initialize").masters;
      if (!masters.has_value()) continue;
      bool has_master = false;
      for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
        has_master = has_master || masters->is_master(parameter);
      });
      if (!has_master) continue;
      throw Error("amp.initialize", "an optimizer of one MixedPrecision, with master weights",
                  "one that another MixedPrecision has",
                  "name all models in one initialize({model, …}, {optimizer, …})");
    }
  }
}

std::vector<MixedPrecision::Impl*> MixedPrecision::Impl::others_of_thread() {
  Owners& owners = Owners::instance();
  const std::lock_guard lock(owners.mutex);
  std::vector<Impl*> others;
  for (const auto& [optimizer, impl] : owners.by_optimizer) {
    if (impl != this && impl->used_by.load() == std::this_thread::get_id() &&
        std::find(others.begin(), others.end(), impl) == others.end())
      others.push_back(impl);
  }
  return others;
}

bool MixedPrecision::Impl::is_alive(const Impl* impl) {
  Owners& owners = Owners::instance();
  const std::lock_guard lock(owners.mutex);
  return std::any_of(owners.by_optimizer.begin(), owners.by_optimizer.end(),
                     [&](const auto& entry) { return entry.second == impl; });
}

MixedPrecision::Impl& MixedPrecision::Impl::owner_of(const torch::optim::Optimizer& optimizer,
                                                     const char* caller) {
  Owners& owners = Owners::instance();
  const std::lock_guard lock(owners.mutex);
  const auto [first, last] = owners.by_optimizer.equal_range(&optimizer);
  const auto count = std::distance(first, last);
  if (count == 1) return *first->second;
  throw Error(
      std::string("amp.") + caller, "an optimizer that was given to one amp::initialize",
      count == 0 ? "one that no MixedPrecision has" : "one that " + std::to_string(count) + " have",
      count == 0 ? "call amp::initialize with it before, and keep what that returns"
                 : "call it of the MixedPrecision that is meant");
}

}  // namespace semitone::amp
