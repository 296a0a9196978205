// Optimizers, and the state of amp::initialize.

#include "semitone/comm/group.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_optimizer.h"
#include "semitone/parallel/zero_redundancy_optimizer.h"
#include "src/checkpoint/entry.h"
#include "src/core/distinct_parameters.h"
#include "src/core/libtorch_states.h"
#include "src/core/state_mode.h"

#include <torch/serialize.h>

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

namespace semitone::checkpoint {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// Null if the optimizer is not sharded.
const parallel::ZeroRedundancyOptimizer* sharded(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const parallel::ZeroRedundancyOptimizer*>(&optimizer);
}

// Each rank saves its share of a sharded optimizer. All files have the options of all groups, and
// each has the state of some of the parameters. Any optimizer can be loaded from them, one after
// another.
class OptimizerEntry final : public Entry {
 public:
  OptimizerEntry(std::string name, torch::optim::Optimizer& optimizer, PerRank per_rank)
      : Entry(std::move(name), "optimizer", per_rank, Turn::optimizer), optimizer_(optimizer) {}

  std::optional<Share> share() const override {
    if (!is_per_rank()) return std::nullopt;
    const comm::Group& group = sharded(optimizer_)->group();
    return Share{group.rank(), group.size()};
  }

  std::vector<c10::Device> devices() const override {
    std::vector<c10::Device> devices;
    for (const auto& group : optimizer_.param_groups()) {
      for (const at::Tensor& parameter : group.params()) devices.push_back(parameter.device());
    }
    return devices;
  }

  void save(FileRecord&, const UseArchive& use) override {
    OutputArchive archive;
    if (is_per_rank()) {
      sharded(optimizer_)->save_share(archive);
    } else {
      optimizer_.save(archive);
    }
    // Those of torch::optim::Optimizer do nothing.
    const auto use_if_saved = [&](Archive& content) {
      if (content.is_empty())
        throw Error("checkpoint", fmt::format("a state that the optimizer '{}' saves", name()),
                    "none", "override save() and load() of torch::optim::Optimizer in its class");
      use(content);
    };
    use_content(archive, use_if_saved, [](const c10::Storage&) { return true; });
  }

  bool can_be_resharded() const override { return true; }
  bool may_be_sharded() const override { return true; }

  void read(const Source& source, const FileRecord&) override { read_resharded({source}); }

  void read_resharded(const std::vector<Source>& of_ranks) override {
    const StateMode mode;
    States all;
    for (const Source& source : of_ranks) {
      read_one(source);
      for (auto& [parameter, state] : optimizer_.state()) all[parameter] = std::move(state);
    }
    std::swap(all, optimizer_.state());
    finish_states();
  }

  // Without a copy: loading makes new states.
  Undo set_aside() override {
    struct Earlier {
      States state;
      std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
    };
    const auto earlier = std::make_shared<Earlier>();
    for (const auto& group : optimizer_.param_groups())
      earlier->options.push_back(group.has_options() ? group.options().clone() : nullptr);
    std::swap(earlier->state, optimizer_.state());
    return [this, earlier] {
      std::swap(earlier->state, optimizer_.state());
      for (std::size_t g = 0; g < earlier->options.size(); ++g) {
        if (earlier->options[g] != nullptr)
          assign_options(optimizer_.param_groups()[g], *earlier->options[g]);
      }
    };
  }

 private:
  using States = std::remove_reference_t<decltype(std::declval<torch::optim::Optimizer>().state())>;

  // Replaces the state by that in a file.
  void read_one(const Source& source) {
    // LibTorch's optimizers keep the state of parameters that the file does not have, and leave
    // tensors on the archive's device.
    optimizer_.state().clear();
    const DistinctParameters distinct(optimizer_);
    std::vector<c10::Device> all = devices();
    if (all.empty()) all.emplace_back(c10::kCPU);
    const bool spread = std::ranges::adjacent_find(all, std::not_equal_to<>()) != all.end();
    if (spread && dynamic_cast<optim::FusedOptimizer*>(&optimizer_) != nullptr) {
      // It moves each tensor to its parameter's device, whose memory may not suffice for all.
      InputArchive archive = source.archive(c10::kCPU);
      optimizer_.load(archive);
      return;
    }
    InputArchive archive = source.archive(all.front());
    optimizer_.load(archive);
    for (const c10::Device device : std::set<c10::Device, ByName>(all.begin(), all.end())) {
      if (device != all.front()) read_states_of(device, source);
    }
  }

  struct ByName {
    bool operator()(c10::Device a, c10::Device b) const { return a.str() < b.str(); }
  };

  // Replaces the states of the parameters of a device by those that are read to this device.
  void read_states_of(c10::Device device, const Source& source) {
    States others;
    std::swap(others, optimizer_.state());
    InputArchive archive = source.archive(device);
    optimizer_.load(archive);
    for (const auto& group : optimizer_.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (parameter.device() != device) continue;
        const auto state = optimizer_.state().find(parameter.unsafeGetTensorImpl());
        if (state != optimizer_.state().end()) others[state->first] = std::move(state->second);
      }
    }
    std::swap(others, optimizer_.state());
  }

  // What LibTorch's load() leaves to do with the states.
  void finish_states() {
    require_states_fit(optimizer_, "checkpoint.resume", fmt::format("'{}'", name()));
    for (const auto& group : optimizer_.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const auto state = optimizer_.state().find(parameter.unsafeGetTensorImpl());
        if (state == optimizer_.state().end()) continue;
        // A run at O3 has saved 16-bit state. A parameter that is fp32 here needs it in fp32: in
        // bf16, Adam's average of squares times 0.999 is rounded to what it was, and would never
        // decay.
        if (parameter.scalar_type() == at::kFloat) widen_state(*state->second);
      }
    }
    add_initial_states(optimizer_);
  }

  torch::optim::Optimizer& optimizer_;
};

class MixedEntry final : public Entry {
 public:
  MixedEntry(std::string name, amp::MixedPrecision& mixed,
             std::shared_ptr<const Optimizers> optimizers)
      : Entry(std::move(name), "mixed_precision", PerRank::no, Turn::mixed),
        mixed_(mixed),
        optimizers_(std::move(optimizers)) {}

  void save(FileRecord& record, const UseArchive& use) override {
    record.level = level();
    OutputArchive archive;
    mixed_.save(archive);
    // Loss scales may change before the optimizer's step, masters do not.
    use_content(archive, use, [parameters = storages_of_parameters()](const c10::Storage& storage) {
      return parameters.contains(storage.data());
    });
  }

  void read(const Source& source, const FileRecord& record) override {
    if (record.level != level()) return;
    InputArchive archive = source.archive();
    mixed_.load(archive);
  }

  std::string not_restored(const FileRecord& record) const override {
    if (record.level == level()) return {};
    return fmt::format("expected '{}' of {}, got {} in the checkpoint: loss scales start anew",
                       name(), level(), record.level);
  }

 private:
  // O0 has no 16-bit dtype.
  std::string level() const {
    const amp::Properties& properties = mixed_.properties();
    const bool is_low = properties.cast_model_type.has_value() || properties.patch_torch_functions;
    return std::string(amp::name_of(properties.opt_level)) +
           (is_low ? " " + dtype_name(properties.dtype) : "");
  }

  // Of the optimizers: with master weights.
  std::unordered_set<const void*> storages_of_parameters() const {
    std::unordered_set<const void*> storages;
    for (const auto* optimizer : *optimizers_) {
      for (const auto& group : optimizer->param_groups()) {
        for (const at::Tensor& parameter : group.params()) {
          if (parameter.has_storage()) storages.insert(parameter.storage().data());
        }
      }
    }
    return storages;
  }

  amp::MixedPrecision& mixed_;
  std::shared_ptr<const Optimizers> optimizers_;
};

}  // namespace

std::unique_ptr<Entry> optimizer_entry(std::string name, torch::optim::Optimizer& optimizer,
                                       const comm::Group& group) {
  const auto* zero = sharded(optimizer);
  if (zero != nullptr && zero->group().size() > group.size()) {
    throw Error(
        "checkpoint.add",
        fmt::format("all {} ranks of the ZeroRedundancyOptimizer '{}', which save their shares",
                    zero->group().size(), name),
        fmt::format("a group of {}", group.size()), "pass CheckpointOptions().group(group)");
  }
  // Ranks may be sharded in groups of different sizes, down to 1.
  const bool has_shares = zero != nullptr && group.size() > 1;
  return std::make_unique<OptimizerEntry>(std::move(name), optimizer,
                                          has_shares ? PerRank::yes : PerRank::no);
}

std::unique_ptr<Entry> mixed_entry(std::string name, amp::MixedPrecision& mixed,
                                   std::shared_ptr<const Optimizers> optimizers) {
  return std::make_unique<MixedEntry>(std::move(name), mixed, std::move(optimizers));
}

}  // namespace semitone::checkpoint
