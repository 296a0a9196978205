#pragma once

#include "semitone/comm/group.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace semitone::parallel {

/// Any optimizer with its state shared out among the ranks of a group: ZeRO stage 1, what
/// torch.distributed.optim.ZeroRedundancyOptimizer does. Each rank keeps the state of its share of
/// the parameters, steps those, and sends them to the others. The numbers are those of the optimizer
/// alone, bit for bit.
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
/// ranks), amp::GradScaler and amp::initialize work as with the optimizer alone. Parameter groups
/// are read at each step, so options may be changed and parameters be replaced (fp32 master weights)
/// between steps. state() is this rank's share. Master weights are not shared out.
///
/// The gradients of all ranks have to be the same when step() is called, as DistributedDataParallel
/// makes them; a step on one rank only, or inside DistributedDataParallel::join, finds no partner.
///
/// The share of a rank: group after group, parameters from the largest to the smallest (of equals
/// the earlier first), each to the rank that has the fewest elements so far (of equals the lowest).
///
/// Not for optimizers that look at all gradients together: LBFGS, which is an Error, or
/// optim::FusedLAMB with max_grad_norm, which would take the norm of its share. Clip before the
/// step.
class ZeroRedundancyOptimizer : public torch::optim::Optimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  /// Makes the optimizer, of the parameter groups that it is given: all of them, for defaults and
  /// for saved state, or a rank's share, where a group may be empty. Called several times.
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(ParamGroups)>;

  /// All ranks of the group construct theirs together. Error on every rank, which names rank and
  /// parameter, if the parameters differ in number, order, shape, layout or dtype, or are on a
  /// device that the group's backend does not serve, or there are none; Error for a factory that
  /// returns nothing or an optimizer of other parameters than it was given.
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, const Factory& make_optimizer,
                          comm::Group group);
  ZeroRedundancyOptimizer(ParamGroups groups, const Factory& make_optimizer, comm::Group group);

  /// Adds a group, with its own options or the defaults. On all ranks. As for FusedOptimizer, not
  /// through a torch::optim::Optimizer&.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Steps this rank's share, and gets the others' from their ranks. Collective; CommError if a rank
  /// is lost. With a closure, evaluates it first, with gradients enabled, and returns its loss.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Collects the state of all ranks on one, for save(): a copy in CPU memory, good until the next
  /// step() or load(). Collective. Error for a rank that the group does not have.
  void consolidate(int to_rank = 0);

  /// torch::save: writes what the optimizer alone would write. So a run can be resumed with any
  /// number of ranks, or without sharding. Error unless consolidate() has brought the state here;
  /// a group of one process needs no consolidate().
  ///
  ///     optimizer.consolidate();
  ///     if (group.rank() == 0) torch::save(optimizer, "optimizer.pt");
  void save(torch::serialize::OutputArchive& archive) const override;

  /// torch::load: reads what save() or the optimizer alone wrote, on every rank, and keeps this
  /// rank's share, on its parameters' device; the whole state is in memory meanwhile. Options
  /// become the saved ones. FileError, and nothing is changed, if the file is not of such an
  /// optimizer with such parameter groups.
  void load(torch::serialize::InputArchive& archive) override;

  /// The rank whose share a parameter is in, by group and place in the group.
  std::vector<std::vector<int>> owners() const;

  const comm::Group& group() const { return group_; }

 private:
  ZeroRedundancyOptimizer(std::unique_ptr<torch::optim::Optimizer> whole, Factory make_optimizer,
                          comm::Group group);

  std::unique_ptr<torch::optim::Optimizer> make_with_options(const ParamGroups& groups) const;
  std::unique_ptr<torch::optim::Optimizer> with_state(const ParamGroups& groups) const;
  ParamGroups share_of(int rank) const;
  void update_share();

  Factory make_optimizer_;
  comm::Group group_;
  std::vector<std::vector<at::Tensor>> parameters_;        // that local_ was made for, by group
  std::vector<std::vector<at::Tensor>> shares_;            // the same by owner, each once
  std::unique_ptr<torch::optim::Optimizer> local_;         // of the share; state_ has its state
  std::unique_ptr<torch::optim::Optimizer> consolidated_;  // of all parameters
};

}  // namespace semitone::parallel
