#pragma once

#include "semitone/optim/lr_schedule.h"

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace semitone::optim {

/// Sets the learning rates of an optimizer by a schedule. Works with every torch::optim::Optimizer
/// whose options have a learning rate, of LibTorch or Semitone.
///
///     optim::FusedAdam optimizer(model->parameters(), 3e-4);  // the base rate
///     optim::LRScheduler scheduler(
///         optimizer,
///         optim::SequentialLR({optim::LinearLR(500), optim::CosineAnnealingLR(9500)}, {500}));
///     for (auto& batch : loader) {
///       …
///       if (mixed.step(optimizer) == amp::Step::stepped) scheduler.step();
///     }
///
/// The base rate of each parameter group is its learning rate when the scheduler is constructed.
/// All groups follow the schedule, so the ratios of their rates stay those of the base rates. (The
/// minimum of CosineAnnealingLR is the same for all groups, as in PyTorch.)
///
/// A step that mixed precision skips changes no parameter, and must not advance the schedule
/// either: call step() only if the optimizer stepped. MixedPrecision::step, GradScaler::step and
/// FusedOptimizer::step(FusedStep) return that. On a device that decides the step, asking for the
/// outcome waits for it; to avoid the wait, keep the result, and ask after the next backward pass.
///
/// Unlike LibTorch's schedulers, this class can be saved. It has the save() and load() that
/// checkpoint::Checkpoint::add requires.
///
/// The optimizer must outlive this object. Groups that are added to it later get their own rate as
/// base rate at the next step(). Movable. Use it from one thread at a time.
class LRScheduler {
 public:
  /// Sets the rates of the first step. Error if the schedule gives a rate that is negative or not
  /// finite; nothing is changed then. The same holds for the functions below.
  LRScheduler(torch::optim::Optimizer& optimizer, LRSchedule schedule);
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;
  LRScheduler(LRScheduler&&) noexcept = default;
  LRScheduler& operator=(LRScheduler&&) noexcept = default;
  ~LRScheduler() = default;

  /// Counts a step of the optimizer, and sets the rates of the next one. Call it after each step,
  /// or once an epoch if the schedule counts epochs.
  ///
  /// Error after the end of a schedule that has one (LRSchedule::total_steps). Error if the rate of
  /// a group is not the one that this object has set (or, in the first step after load(), has
  /// loaded): another scheduler or the program would be overruled. Combine schedules with
  /// SequentialLR, and change rates with set_base_lrs().
  void step();

  /// Returns the number of steps counted so far. Skipped steps are not among them.
  std::int64_t steps() const { return steps_; }

  /// Returns the rates that the next step of the optimizer uses, one for each group.
  const std::vector<double>& get_last_lr() const { return last_lrs_; }

  /// Returns or sets the base rates, one for each group. Setting them sets the groups' rates too.
  const std::vector<double>& base_lrs() const { return base_lrs_; }
  void set_base_lrs(std::vector<double> base_lrs);

  /// Saves and loads the number of steps, the base rates and the rates. load() sets the rates of
  /// the optimizer. The schedule itself is not saved: it is the program's. If it gives other rates
  /// for the saved step than it did in the saved run, load() logs a warning, and training continues
  /// with those of this program.
  ///
  /// The optimizer, whose file has the saved run's rates too, may be loaded before or after. With
  /// another schedule, load the optimizer first. Otherwise its file replaces the rates that load()
  /// has set: steps of the optimizer until the next step() or set_base_lrs() use those of the saved
  /// run, not those of get_last_lr(). step() then logs a warning, and sets those of this program.
  ///
  /// FileError, with nothing changed, if the archive is not a scheduler's, has another number of
  /// groups, or a step after the end of the schedule.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  // The rates of all groups; Error for one that an optimizer cannot use.
  std::vector<double> rates(const std::vector<double>& base_lrs, std::int64_t steps) const;
  void set(std::vector<double> base_lrs, std::int64_t steps, std::vector<double> lrs);
  // Whether the optimizer's file has replaced the rates that load() has set.
  bool was_loaded_later(const std::vector<double>& current) const;

  torch::optim::Optimizer* optimizer_;
  LRSchedule schedule_;
  std::int64_t steps_ = 0;
  std::vector<double> base_lrs_;
  std::vector<double> last_lrs_;
  // From load() to step(): the saved run's rates, which the optimizer has if it is loaded later.
  std::vector<double> loaded_lrs_;
};

}  // namespace semitone::optim
