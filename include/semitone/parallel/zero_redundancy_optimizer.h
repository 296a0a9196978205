#pragma once

#include "semitone/comm/group.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace semitone::parallel {

/// Shards the state of any optimizer over the ranks of a group: ZeRO stage 1, as in
/// torch.distributed.optim.ZeroRedundancyOptimizer. Each rank keeps the optimizer state of its
/// share of the parameters, steps this share, and sends the updated parameters to the others.
/// Results equal those of the unsharded optimizer, bit for bit.
///
///     const auto group = comm::init();
///     Net model;
///     parallel::DistributedDataParallel ddp(model, group);
///     parallel::ZeroRedundancyOptimizer optimizer(
///         model->parameters(),
///         [](auto groups) {
///           return std::make_unique<torch::optim::AdamW>(std::move(groups),
///                                                        torch::optim::AdamWOptions(1e-3));
///         },
///         group);
///     …
///     loss.backward();   // every rank has every gradient
///     optimizer.step();
///
/// It is a torch::optim::Optimizer: learning rate schedulers, zero_grad, add_param_group (on all
/// ranks), amp::GradScaler and amp::initialize work as with the unsharded optimizer. Parameter
/// groups are read at each step, so options may change, and parameters may be replaced (fp32 master
/// weights), between steps. state() has the state of this rank's share. Master weights are not
/// sharded.
///
/// The gradients must be equal on all ranks when step() is called, as DistributedDataParallel makes
/// them. All ranks must call step(): a call on one rank only, or inside
/// DistributedDataParallel::join, blocks until the others call it.
///
/// Parameters are assigned to ranks group by group, from the largest to the smallest (the earlier
/// first if equal). Each goes to the rank with the fewest elements so far (the lowest rank if
/// equal), and stays there, with its state, if others are added to the groups or removed later.
///
/// Optimizers that combine all gradients are Errors: LBFGS, and on several ranks optim::FusedLAMB with
/// a max_grad_norm (its default is 1), which needs the norm of all gradients. Set it to 0, and clip
/// before the step instead.
class ZeroRedundancyOptimizer : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  /// Creates the optimizer for the parameter groups in its argument. The class calls it with all
  /// groups (in the constructor, consolidate(), save() and load()), with one group (in
  /// add_param_group()), and with a rank's share, in which groups may be empty.
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(ParamGroups)>;

  /// All ranks of the group must call the constructor. Error on every rank, naming rank and
  /// parameter, if parameters differ in number, order, shape, layout or dtype, if they are on a
  /// device that the group's backend does not support, or if there are none. With several ranks,
  /// also if two parameters share memory, as after set_data with another parameter: each would be
  /// stepped by its own rank, and one update would be lost. (Disjoint views of one storage are
  /// allowed, and so is a parameter that is registered in two places.) step() throws the same for
  /// parameters that are added or replaced later. Error for a factory that returns null or an
  /// optimizer of other parameters.
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, const Factory& make_optimizer,
                          comm::Group group);
  ZeroRedundancyOptimizer(ParamGroups groups, const Factory& make_optimizer, comm::Group group);

  /// Adds a group with its own options or the defaults. Call it on all ranks, and, as for
  /// FusedOptimizer, not through a torch::optim::Optimizer&.
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method): that is why.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Steps this rank's share, and receives the other shares from their ranks. Collective; CommError
  /// if a rank is lost. A closure is evaluated first, with gradients enabled, and its loss is
  /// returned.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Collects the state of all ranks on one rank for save(), as a copy in CPU memory that is valid
  /// until the next step() or load(). Collective. Error for a rank that the group does not have, and
  /// for a class of optimizer without a save() of its own, as in save() and save_share().
  void consolidate(int to_rank = 0);

  /// Writes the file that the unsharded optimizer would write, for torch::save. A run can therefore
  /// be resumed with any number of ranks, or without sharding. Error unless consolidate() has
  /// collected the state on this rank; a group of one process does not need it.
  ///
  ///     optimizer.consolidate();
  ///     if (group.rank() == 0) torch::save(optimizer, "optimizer.pt");
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Writes a file of the same format that has only the state of this rank's share. It is not
  /// collective, and it copies nothing: the archive holds the optimizer's own tensors. load()
  /// accepts such a file; the parameters of other shares then have no state. checkpoint::Checkpoint
  /// saves one share for each rank, and loads all of them.
  void save_share(torch::serialize::OutputArchive& archive) const;

  /// Reads a file that save(), save_share() or the unsharded optimizer wrote, for torch::load. Each
  /// rank reads all of the state in the file and keeps its share, on its parameters' device. Saved
  /// options replace the current ones. Split masters for which the file has no lower halves are the
  /// rounded weights then. FileError, with nothing changed, if the file does not match the optimizer
  /// and its parameter groups.
  void load(torch::serialize::InputArchive& archive) override;

  /// Returns the rank that owns each parameter, by group and index in the group.
  std::vector<std::vector<int>> owners() const;

  const comm::Group& group() const { return group_; }

 private:
  ZeroRedundancyOptimizer(std::unique_ptr<torch::optim::Optimizer> whole, Factory make_optimizer,
                          comm::Group group);

  std::unique_ptr<torch::optim::Optimizer> make_with_options(const ParamGroups& groups) const;
  std::unique_ptr<torch::optim::Optimizer> with_state(const ParamGroups& groups) const;
  ParamGroups share_of(int rank) const;
  bool loses_state() const;
  void update_share();
  void keep_owners(std::unordered_map<const c10::TensorImpl*, int>& owner_of,
                   std::vector<std::int64_t>& elements) const;

  Factory make_optimizer_;
  comm::Group group_;
  std::vector<std::vector<at::Tensor>> parameters_;  // those of each group when local_ was made
  std::vector<std::vector<int>> owners_;             // of each of them
  std::vector<std::vector<at::Tensor>> shares_;      // those of each rank, without duplicates
  std::unique_ptr<torch::optim::Optimizer> local_;   // steps this rank's share; its state is state_
  std::unique_ptr<torch::optim::Optimizer> consolidated_;  // of all parameters
};

}  // namespace semitone::parallel
