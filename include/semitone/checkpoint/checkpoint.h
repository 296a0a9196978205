#pragma once

#include "semitone/autocast/model.h"
#include "semitone/checkpoint/checkpoint_options.h"
#include "semitone/parallel/gradient_order.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/data/samplers/base.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace semitone::amp {
class MixedPrecision;
}  // namespace semitone::amp

/// Saving a training run and resuming it.
namespace semitone::checkpoint {

/// Which ranks save an entry. no: it is equal on all ranks, and rank 0 saves it for all. yes: each
/// rank saves and loads its own.
enum class PerRank { no, yes };

/// A class with save() and load() of LibTorch's form, other than modules and optimizers: GradScaler,
/// LossScaler, samplers, classes of the program. load() should throw, with nothing changed, if the
/// archive does not fit. Its tensors are on the CPU: load() copies them to where the object has its
/// own. resume() also calls save(), of the object as it is, to put its state back if it fails.
template <typename T>
concept Savable =
    !std::is_base_of_v<torch::nn::Module, T> && !std::is_base_of_v<torch::optim::Optimizer, T> &&
    requires(const T& saved, T& loaded, torch::serialize::OutputArchive& out,
             torch::serialize::InputArchive& in) {
      saved.save(out);
      loaded.load(in);
    };

/// A class whose states can be loaded with a different number of ranks: DistributedSampler,
/// EvaluationSampler, the compressing hooks of DistributedDataParallel, classes of the program.
/// load_resharded() gets what save() wrote on each rank of the saved run, in the order of their
/// numbers. Each current rank calls it, with all of these archives in memory. It should throw, with
/// nothing changed, if an archive does not fit.
template <typename T>
concept Reshardable =
    Savable<T> && requires(T& loaded, std::span<torch::serialize::InputArchive> saved) {
      loaded.load_resharded(saved);
    };

/// A DistributedDataParallel: a class with a parallel::GradientOrder.
template <typename T>
concept HasGradientOrder =
    requires(T& changed, const T& saved, const std::optional<parallel::GradientOrder>& order) {
      { saved.gradient_order() } -> std::same_as<std::optional<parallel::GradientOrder>>;
      changed.set_gradient_order(order);
    };

/// The checkpoints of a run, in a directory with one directory for each saved step:
///
///     checkpoint::Checkpoint checkpoint("runs/7");
///     checkpoint.add("model", model).add("optimizer", optimizer).add("mixed", mixed);
///     for (auto step = checkpoint.resume().value_or(0); step < steps;) {
///       …  // one training step
///       if (++step % 100 == 0) checkpoint.save(step);
///     }
///
/// Killed at any moment and started again, this program ends with the same parameters as if it had
/// not been killed, bit for bit, if everything that changes during training has been added. Random
/// numbers of LibTorch's default generators need not be added.
///
/// A checkpoint is complete or absent. save() writes "step-00000120.partial", flushes every file
/// and the directory to the disk, and then renames it to "step-00000120". A crash, a full disk or a
/// loss of power leaves the earlier checkpoints as they were. Its file manifest.json lists the other
/// files with their sizes and CRC-32 checksums, so that resume() recognises damaged files.
/// docs/checkpoints.md describes the files.
///
/// Every object must outlive the Checkpoint, except models that are passed in a shared pointer or
/// a module holder. Only one thread at a time may use a Checkpoint and the objects that were added.
/// Movable.
class Checkpoint {
 public:
  /// Does not touch the disk. Error if `directory` is empty.
  explicit Checkpoint(std::filesystem::path directory, const CheckpointOptions& options = {});
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  /// Adds an object, under a name that is unique in this Checkpoint and becomes the name of a file.
  /// A name has letters, digits, '_', '-' and '.', begins with a letter or digit, is not "random",
  /// and does not end in ".rank" and a number. Error otherwise. The order of the calls has no meaning.
  ///
  /// Adds a model: any torch::nn::Module, in a holder, shared pointer or by reference, or a
  /// TorchScript module. Saves what torch::save would save. If a MixedPrecision that has been added
  /// manages the model, its weights are saved in fp32, as by MixedPrecision::save_model, and can be
  /// loaded at any opt level. Of a TorchScript module, parameters and buffers are loaded. Loading
  /// writes into the memory of the model's tensors.
  Checkpoint& add(const std::string& name, const amp::Model& model);

  /// Adds an optimizer of any class that overrides save() and load() of torch::optim::Optimizer. Each
  /// rank saves its share of a ZeroRedundancyOptimizer; Error unless the checkpoint's group has all
  /// of the optimizer's ranks. Any number of ranks can resume from these shares, and so can the
  /// unsharded optimizer. A ZeroRedundancyOptimizer can also resume from the unsharded optimizer.
  /// resume() converts 16-bit state that a run at O3 has saved to fp32 where the parameters are
  /// fp32. Semitone's optimizers choose the dtype of their state themselves
  /// (optim/fused_optimizer.h).
  Checkpoint& add(const std::string& name, torch::optim::Optimizer& optimizer);

  /// Adds the state of amp::initialize. At the opt level and dtype that were saved, resume()
  /// restores loss scales and master weights. At others, master weights come from the fp32 weights
  /// of the model, loss scales start anew, and a warning says so.
  Checkpoint& add(const std::string& name, amp::MixedPrecision& mixed);

  /// Adds a DistributedDataParallel, of which the order of gradients is saved: with three or more
  /// ranks a resumed run rounds their sums as an undisturbed one only if it has the same order.
  /// The model is added by itself. Call resume() before the first forward. An order that does not
  /// fit, because of other bucket sizes, or because another opt level has other dtypes, is not an
  /// error: a warning says so, and the first step determines a new one. The same holds for an order
  /// that comes too late. A checkpoint without this entry can be resumed too, and so can one of
  /// another number of ranks.
  template <HasGradientOrder T>
  Checkpoint& add(const std::string& name, T& replicas) {
    return add_gradient_order(
        name, [&replicas] { return replicas.gradient_order(); },
        [&replicas](const std::optional<parallel::GradientOrder>& order) {
          replicas.set_gradient_order(order);
        });
  }

  /// Adds any other object with save() and load(). Samplers of indices and Reshardable classes
  /// differ between ranks, and are saved by each of them. The latter can be resumed with any number
  /// of ranks; a sampler's num_replicas must be the size of the group.
  template <Savable T>
  Checkpoint& add(const std::string& name, T& object, PerRank per_rank = default_of<T>()) {
    LoadResharded load_resharded;
    if constexpr (Reshardable<T>) {
      load_resharded = [&object](std::span<torch::serialize::InputArchive> saved) {
        object.load_resharded(saved);
      };
    }
    return add_state(
        name, [&object](torch::serialize::OutputArchive& archive) { object.save(archive); },
        [&object](torch::serialize::InputArchive& archive) { object.load(archive); },
        std::move(load_resharded), per_rank);
  }

  /// Adds a number. FileError when resuming if a saved integer is outside the range of T.
  template <typename T>
    requires(std::is_arithmetic_v<T> && sizeof(T) <= sizeof(std::int64_t))
  Checkpoint& add(const std::string& name, T& value, PerRank per_rank = PerRank::no) {
    if constexpr (std::is_floating_point_v<T>) {
      return add_real(
          name, [&value] { return static_cast<double>(value); },
          [&value](double loaded) { value = static_cast<T>(loaded); }, per_rank);
    } else {
      return add_integer(
          name, [&value] { return static_cast<std::int64_t>(value); },
          [&value](std::int64_t loaded) { value = static_cast<T>(loaded); }, limits_of<T>(),
          per_rank);
    }
  }

  /// Adds a string.
  Checkpoint& add(const std::string& name, std::string& value, PerRank per_rank = PerRank::no);

  /// Adds a tensor. Loading writes into its memory, and requires the saved shape and dtype. If the
  /// tensor is undefined, loading assigns a tensor on the CPU.
  Checkpoint& add(const std::string& name, at::Tensor& value, PerRank per_rank = PerRank::no);

  /// Adds a generator of the program, of any device. Each rank saves its own.
  Checkpoint& add(const std::string& name, const at::Generator& generator);

  /// Adds a setting that a resumed run must have in common with the saved one, such as the batch
  /// size or the random seed: add_setting("--batch-size", "32"). Both functions of the name resume
  /// throw a FileError that lists all settings that differ, with both values, before they compare
  /// or change objects. A setting that only one of the two runs has differs too. Settings are
  /// text in the manifest. Error if the name is empty or was given before, or if one of the two is
  /// not UTF-8. The order of the calls has no meaning.
  Checkpoint& add_setting(const std::string& name, const std::string& value);

  /// Saves a checkpoint of this step, and then deletes those beyond CheckpointOptions::keep and
  /// keep_best, the oldest first. Creates the directory if necessary. Call it between two training steps:
  /// MixedPrecision::save is an Error between scale_loss and step.
  ///
  /// FileError, with the system's reason, if the checkpoint cannot be written (disk full, no
  /// permission, the directory is a file, another process saves there at this moment). The earlier
  /// checkpoints are then unchanged, no partial one is left, and a later call may succeed. On NFS,
  /// processes of other machines that save there are not noticed. Error if nothing was added or the
  /// step is negative. Error if the name of a model's tensor is not UTF-8. Error if the directory has
  /// a checkpoint of a later step that resume() has not rejected: a run that should have been resumed
  /// would otherwise continue from the wrong checkpoint later. Error if it has checkpoints, and no
  /// Checkpoint of this process has saved there or resumed from it: they would be deleted in time. A
  /// checkpoint of the same step is replaced; without a metric, this call keeps the one that the last
  /// call gave for this step, or that resume() has found. Error if ranks have added objects of
  /// different names. Error if LibTorch could not read the file: for names that are words of
  /// TorchScript, such as "in", or have quotes, backslashes or control characters, and for tensors of
  /// two dtypes in the same memory.
  ///
  /// DivergedError if a parameter that requires a gradient is inf or NaN in a model: the
  /// checkpoint would be worthless, and take the place of a good one. Nothing has changed then, so
  /// that resume() loads the last good checkpoint. See CheckpointOptions::nonfinite_weights.
  ///
  /// Removes what killed processes have left in the directory, and checkpoints of later steps that
  /// resume() has rejected.
  ///
  /// Collective. Rank 0 writes what is equal on all ranks, and each rank its own entries. If one
  /// rank fails, all ranks throw.
  /// @param step    the number of steps done, at least 0
  /// @param metric  how good the model is, such as its loss on a validation set: see
  ///                CheckpointOptions::keep_best. That of rank 0 counts. A metric that is not finite
  ///                is saved as none
  void save(std::int64_t step, std::optional<double> metric = std::nullopt);

  /// Saves like save(), but returns as soon as the state has been copied to CPU memory. A thread
  /// then writes the files, while the training may continue and change everything. With
  /// CheckpointOptions::copy_in_background it returns earlier, and wait_for_copy() has to be called
  /// before parameters and the states of optimizers change. The copy takes
  /// the memory of one checkpoint, which is kept for the next call. If the previous checkpoint is
  /// still being written, save_async() waits for it first, so there is never more than one copy.
  ///
  /// If the files cannot be written, the next call of save(), save_async(), resume(), wait() or
  /// best_step() throws what save() would have thrown, once, and does nothing else. The destructor
  /// waits for the files, and logs such an error. std::exit() runs no destructor: call wait()
  /// before it.
  ///
  /// Tensors of devices are tensors on the CPU in the files, which makes no difference to resume().
  /// Their copies are in pinned memory, which LibTorch rounds up to powers of two and keeps.
  ///
  /// Collective. With several ranks, the first call makes a group of its own for the threads.
  void save_async(std::int64_t step, std::optional<double> metric = std::nullopt);

  /// Waits until the tensors that the last save_async() left to its thread have been copied: see
  /// CheckpointOptions::copy_in_background. Returns at once if there are none. Throws nothing. Not
  /// collective.
  void wait_for_copy();

  /// Returns when the checkpoint of the last save_async() is complete. Throws what save() would have
  /// thrown if it could not be written.
  void wait();

  /// Loads the newest checkpoint of the directory into the objects that were added, and returns its
  /// step. Returns std::nullopt, and changes nothing, if there is none.
  ///
  /// Sizes and checksums of all files are verified before anything is changed. If a file is
  /// missing, truncated or changed, a warning names it, and the previous checkpoint is taken.
  /// FileError if there are checkpoints and all are damaged, if a file cannot be read for another
  /// reason (permissions, a network), or if another version of Semitone wrote it.
  ///
  /// FileError if the checkpoint is whole but does not fit: if it has other entries, or a tensor of
  /// a model has another shape or dtype (the message names the first, with both shapes). All objects
  /// have their earlier state after an exception, except gradients, and what an optimizer has beside
  /// its state() and options. To ensure that, resume() keeps a copy of this state in CPU memory,
  /// except that of optimizers, until it returns.
  ///
  /// Collective. Each rank loads the common entries and its own. With another number of ranks
  /// than the saved one, a Reshardable entry with PerRank::yes is loaded from those of all ranks.
  /// Other entries with PerRank::yes are a FileError then, and ranks that the saved run did not have
  /// keep the states of their default generators.
  std::optional<std::int64_t> resume();

  /// Loads the checkpoint of this step, whether it is the newest or not, into the objects that were
  /// added. FileError if there is none, if it is damaged, or if it does not fit; all objects have
  /// their earlier state then. Later checkpoints stay, so that save() refuses the steps before
  /// them: to continue from an earlier step, save in another directory.
  ///
  /// Collective, as resume().
  void resume(std::int64_t step);

  const std::filesystem::path& directory() const;

  /// Returns the directory of a step's checkpoint, whether it exists or not:
  /// "DIRECTORY/step-00000120".
  std::filesystem::path path_of(std::int64_t step) const;

  /// Returns the step of the checkpoint with the best metric, by the order of
  /// CheckpointOptions::keep_best, or std::nullopt if none has a metric. Waits for save_async(). Reads
  /// the manifests, and passes over damaged ones and what resume() has rejected; resume(step) then
  /// verifies the other files. Collective: all ranks get the step that rank 0 finds.
  std::optional<std::int64_t> best_step() const;

  /// Returns the steps of the checkpoints in the directory, in ascending order, without verifying
  /// them.
  std::vector<std::int64_t> steps() const;

  /// The implementation.
  struct Impl;

 private:
  using SaveState = std::function<void(torch::serialize::OutputArchive&)>;
  using LoadState = std::function<void(torch::serialize::InputArchive&)>;
  using LoadResharded = std::function<void(std::span<torch::serialize::InputArchive>)>;

  // The values of an integral type. Those of 64 bits are saved bit by bit.
  struct Limits {
    std::int64_t least;
    std::int64_t most;
  };

  template <typename T>
  static constexpr Limits limits_of() {
    if constexpr (sizeof(T) == sizeof(std::int64_t)) {
      return {std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()};
    } else {
      return {static_cast<std::int64_t>(std::numeric_limits<T>::min()),
              static_cast<std::int64_t>(std::numeric_limits<T>::max())};
    }
  }

  template <typename T>
  static constexpr PerRank default_of() {
    return Reshardable<T> ||
                   std::is_base_of_v<torch::data::samplers::Sampler<std::vector<std::size_t>>, T>
               ? PerRank::yes
               : PerRank::no;
  }

  Checkpoint& add_gradient_order(
      const std::string& name, std::function<std::optional<parallel::GradientOrder>()> get,
      std::function<void(const std::optional<parallel::GradientOrder>&)> set);
  Checkpoint& add_state(const std::string& name, SaveState save, LoadState load,
                        LoadResharded load_resharded, PerRank per_rank);
  Checkpoint& add_integer(const std::string& name, std::function<std::int64_t()> get,
                          std::function<void(std::int64_t)> set, const Limits& limits,
                          PerRank per_rank);
  Checkpoint& add_real(const std::string& name, std::function<double()> get,
                       std::function<void(double)> set, PerRank per_rank);

  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::checkpoint
