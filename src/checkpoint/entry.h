#pragma once

#include "semitone/amp/mixed_precision.h"
#include "semitone/autocast/model.h"
#include "semitone/checkpoint/checkpoint.h"
#include "semitone/comm/group.h"
#include "semitone/parallel/gradient_order.h"
#include "src/checkpoint/archive.h"
#include "src/checkpoint/file_record.h"
#include "src/checkpoint/files.h"

#include <ATen/core/Generator.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

// The objects of a checkpoint.
namespace semitone::checkpoint {

// The bytes that an entry wrote: a file, or memory.
class Source {
 public:
  explicit Source(std::filesystem::path path) : where_(std::move(path)) {}
  explicit Source(std::shared_ptr<const std::string> bytes) : where_(std::move(bytes)) {}

  // Reads an archive, with its tensors on the device. FileError for a file with code.
  torch::serialize::InputArchive archive(c10::Device device = c10::kCPU) const;
  // The tensors of a TorchScript module that have these names. The code in a file is not read.
  std::unordered_map<std::string, at::Tensor> tensors_of_script(
      const std::unordered_set<std::string>& names) const;
  // A TorchScript module in memory, which this process has written.
  torch::jit::Module script() const;
  // The file, for a message.
  std::string text() const;

 private:
  std::variant<std::filesystem::path, std::shared_ptr<const std::string>> where_;
};

// An object that was added.
class Entry {
 public:
  // When an entry is loaded. Masters are loaded after the optimizers, which may hold them, and
  // models after both: at another opt level, the model's fp32 weights become the masters. Default
  // generators are last, since other objects may draw random numbers when they are loaded.
  enum class Turn { optimizer, mixed, model, other, random };
  using UseArchive = std::function<void(Archive&)>;
  // Ends what set_aside() began: puts the earlier state back.
  using Undo = std::function<void()>;

  Entry(std::string name, std::string kind, PerRank per_rank, Turn turn = Turn::other)
      : name_(std::move(name)), kind_(std::move(kind)), per_rank_(per_rank), turn_(turn) {}
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  virtual ~Entry() = default;

  const std::string& name() const { return name_; }
  const std::string& kind() const { return kind_; }
  bool is_per_rank() const { return per_rank_ == PerRank::yes; }
  Turn turn() const { return turn_; }

  // Whether a checkpoint may lack the entry, or the entry of this rank.
  virtual bool may_be_missing() const { return false; }
  // The devices of its tensors.
  virtual std::vector<c10::Device> devices() const { return {}; }
  // Describes the first trainable weight that is inf or NaN: "NaN in 'fc.weight' of 'model'". Empty if
  // there is none.
  virtual std::string nonfinite_weight() const { return {}; }
  // Calls `use` with the content of the file, and sets what the manifest says about it. The archive
  // has the object's own tensors, which may change when this function returns.
  virtual void save(FileRecord& record, const UseArchive& use) = 0;
  void write(const Sink& sink, FileRecord& record) {
    save(record, [&](Archive& archive) { archive.write(sink); });
  }
  // FileError unless the object has the tensors of a record. `path` is for the message.
  virtual void require_fits(const FileRecord&, const std::string& /*path*/) const {}
  // Loads what save() saved.
  virtual void read(const Source& source, const FileRecord& record) = 0;
  // Whether an entry with PerRank::yes can be loaded with a different number of ranks.
  virtual bool can_be_resharded() const { return false; }
  // A part of an object that ranks have divided.
  struct Share {
    int number;
    int count;
  };
  // That of this rank. All ranks have one, or none has.
  virtual std::optional<Share> share() const { return std::nullopt; }
  // Whether it can be loaded from one file of the whole run as well as from one of each rank.
  virtual bool may_be_sharded() const { return false; }
  // Loads what each rank of the saved run saved.
  virtual void read_resharded(const std::vector<Source>& /*of_ranks*/) {}
  // Does what must wait until all ranks have read all entries. Collective.
  virtual void after_reading() {}
  // What was not restored, for a warning; usually empty.
  virtual std::string not_restored(const FileRecord&) const { return {}; }
  // Keeps the state so that it can be put back after a read() that failed. By default a copy in
  // memory.
  virtual Undo set_aside();

 protected:
  static void use_content(const torch::serialize::OutputArchive& archive, const UseArchive& use,
                          Archive::IsSteady is_steady = {}) {
    Archive content(archive);
    content.set_steady(std::move(is_steady));
    use(content);
  }

 private:
  std::string name_;
  std::string kind_;
  PerRank per_rank_;
  Turn turn_;
};

using MixedPrecisions = std::vector<amp::MixedPrecision*>;
using Optimizers = std::vector<const torch::optim::Optimizer*>;

std::unique_ptr<Entry> model_entry(std::string name, const amp::Model& model,
                                   std::shared_ptr<const MixedPrecisions> mixed);
// `group` has the ranks of the checkpoint. Error if it lacks ranks of a ZeroRedundancyOptimizer.
std::unique_ptr<Entry> optimizer_entry(std::string name, torch::optim::Optimizer& optimizer,
                                       const comm::Group& group);
std::unique_ptr<Entry> mixed_entry(std::string name, amp::MixedPrecision& mixed,
                                   std::shared_ptr<const Optimizers> optimizers);
std::unique_ptr<Entry> tensor_entry(std::string name, at::Tensor& tensor, PerRank per_rank);

// The order of gradients of a DistributedDataParallel. `set` is collective, and throws Error on all
// ranks if it cannot be that.
std::unique_ptr<Entry> gradient_order_entry(
    std::string name, std::function<std::optional<parallel::GradientOrder>()> get,
    std::function<void(const std::optional<parallel::GradientOrder>&)> set);

// Functions that save and load an object.
struct StateFunctions {
  std::function<void(torch::serialize::OutputArchive&)> save;
  std::function<void(torch::serialize::InputArchive&)> load;
  // From what each rank of a run with a different number of ranks has saved; empty if that cannot be.
  std::function<void(std::span<torch::serialize::InputArchive>)> load_resharded = {};
};
std::unique_ptr<Entry> state_entry(std::string name, std::string kind, StateFunctions functions,
                                   PerRank per_rank);

// Generators by names. The functions are called at each use. If `optional`, ranks and devices that
// the saved run did not have keep their states.
using NamedGenerators = std::vector<std::pair<std::string, at::Generator>>;
std::unique_ptr<Entry> generators_entry(std::string name, std::string kind,
                                        std::function<NamedGenerators()> generators, bool optional);

}  // namespace semitone::checkpoint
