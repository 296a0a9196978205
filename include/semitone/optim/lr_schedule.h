#pragma once

#include <torch/arg.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace semitone::optim {

/// A class that computes the learning rate of each step: those of this header, or one of yours.
/// Copies are made. lr() must return the same number for the same arguments in every run.
///
/// Two more functions are used if the class has them. `void check() const` throws if the options
/// are wrong, and is called when an LRSchedule is made. `std::optional<std::int64_t> total_steps()
/// const` returns the number of steps after which the schedule has no rates.
template <typename T>
concept ComputesLR = std::copy_constructible<T> && requires(const T& schedule) {
  { schedule.lr(0.1, std::int64_t{0}) } -> std::convertible_to<double>;
};

/// Any schedule of learning rates, as a value. Immutable; copies share the schedule.
///
/// A schedule maps the base rate of a parameter group and the number of steps done to a learning
/// rate. It has no state: LRScheduler counts the steps. It can therefore be evaluated for any step,
/// for example to plot it:
///
///     const optim::LRSchedule schedule = optim::CosineAnnealingLR(1000);
///     for (std::int64_t step = 0; step < 1000; step += 100)
///       std::cout << schedule.lr(3e-4, step) << '\n';
///
/// The schedules below have the names, the options and the formulas of torch.optim.lr_scheduler
/// (2.11), with three exceptions: numbers of steps have no defaults, OneCycleLR takes its maximum
/// from the optimizer, and CosineAnnealingLR does not rise again after T_max. Formulas are computed
/// in fp64 from the number of steps. (Python multiplies the rate of the previous step, which rounds
/// differently in the last digits.)
class LRSchedule {
 public:
  /// Error if the schedule's options are wrong.
  template <typename T>
    requires(!std::same_as<T, LRSchedule> && ComputesLR<T>)
  LRSchedule(T schedule) {  // NOLINT(google-explicit-constructor): any schedule is one
    if constexpr (requires { schedule.check(); }) schedule.check();
    schedule_ = std::make_shared<const Held<T>>(std::move(schedule));
  }

  /// Returns the rate for the step after `step` steps: 0 for the first step of a training. Error
  /// for a negative step, and for one that is above total_steps().
  double lr(double base_lr, std::int64_t step) const;

  /// Returns the number of steps after which the schedule has no rates, if it has such an end.
  /// Most schedules keep their last rate instead.
  std::optional<std::int64_t> total_steps() const { return schedule_->total_steps(); }

 private:
  struct Any {
    Any() = default;
    Any(const Any&) = delete;
    Any& operator=(const Any&) = delete;
    virtual ~Any() = default;
    virtual double lr(double base_lr, std::int64_t step) const = 0;
    virtual std::optional<std::int64_t> total_steps() const = 0;
  };

  template <typename T>
  struct Held final : Any {
    explicit Held(T given) : schedule(std::move(given)) {}
    double lr(double base_lr, std::int64_t step) const override {
      return schedule.lr(base_lr, step);
    }
    std::optional<std::int64_t> total_steps() const override {
      if constexpr (requires { schedule.total_steps(); }) {
        return schedule.total_steps();
      } else {
        return std::nullopt;
      }
    }
    T schedule;
  };

  std::shared_ptr<const Any> schedule_;
};

/// Warm-up: the rate goes from base * start_factor to base * end_factor on a line, and stays there.
///
///     base * (start_factor + (end_factor - start_factor) * min(step, total_iters) / total_iters)
struct LinearLR {
  /// @param total_iters  number of steps, at least 1
  explicit LinearLR(std::int64_t total_iters) : total_iters_(total_iters) {}
  TORCH_ARG(std::int64_t, total_iters);
  /// Factor of the first step, in [0, 1]. Default 1/3. (Python refuses 0, with which the first step
  /// changes nothing.)
  TORCH_ARG(double, start_factor) = 1.0 / 3;
  /// Factor from step total_iters on, in [0, 1].
  TORCH_ARG(double, end_factor) = 1;

 public:
  double lr(double base_lr, std::int64_t step) const;
  void check() const;
};

/// The rate falls from the base rate to eta_min along half a cosine (Loshchilov, Hutter 2017), and
/// stays there. (Python's rises again after T_max.)
///
///     eta_min + (base - eta_min) * (1 + cos(pi * min(step, T_max) / T_max)) / 2
struct CosineAnnealingLR {
  /// @param T_max  number of steps, at least 1
  explicit CosineAnnealingLR(std::int64_t T_max) : T_max_(T_max) {}
  TORCH_ARG(std::int64_t, T_max);
  /// The minimum, the same for all groups: at least 0. lr() throws Error if a base rate is below
  /// it, since the rate would rise.
  TORCH_ARG(double, eta_min) = 0;

 public:
  double lr(double base_lr, std::int64_t step) const;
  void check() const;
};

/// The rate falls from the base rate to 0 as a power, and stays there.
///
///     base * (1 - min(step, total_iters) / total_iters) ^ power
struct PolynomialLR {
  /// @param total_iters  number of steps, at least 1
  explicit PolynomialLR(std::int64_t total_iters) : total_iters_(total_iters) {}
  TORCH_ARG(std::int64_t, total_iters);
  /// Above 0. With 1 the rate falls on a line.
  TORCH_ARG(double, power) = 1;

 public:
  double lr(double base_lr, std::int64_t step) const;
  void check() const;
};

/// The rate is multiplied by gamma every step_size steps.
struct StepLR {
  /// @param step_size  number of steps, at least 1
  explicit StepLR(std::int64_t step_size) : step_size_(step_size) {}
  TORCH_ARG(std::int64_t, step_size);
  /// Above 0.
  TORCH_ARG(double, gamma) = 0.1;

 public:
  double lr(double base_lr, std::int64_t step) const;
  void check() const;
};

/// The rate is multiplied by gamma at each milestone.
struct MultiStepLR {
  /// @param milestones  numbers of steps, above 0 and ascending
  explicit MultiStepLR(std::vector<std::int64_t> milestones) : milestones_(std::move(milestones)) {}
  TORCH_ARG(std::vector<std::int64_t>, milestones);
  /// Above 0.
  TORCH_ARG(double, gamma) = 0.1;

 public:
  double lr(double base_lr, std::int64_t step) const;
  void check() const;
};

/// How OneCycleLR goes from one rate to another: along half a cosine, or on a line.
enum class AnnealStrategy : std::uint8_t { cos, linear };

/// One cycle (Smith, Topin 2018): the rate rises from base / div_factor to the base rate, and then
/// falls to base / div_factor / final_div_factor.
///
/// The base rate is Python's max_lr: give the maximum to the optimizer, as for all schedules.
/// Momentum does not change (Python's cycle_momentum=False). The cycle ends with step total_steps -
/// 1, the last step. LRScheduler::step() may be called after it, but not once more: that is an
/// Error, as in Python.
struct OneCycleLR {
  /// @param total_steps  number of steps of the whole training, at least 1
  explicit OneCycleLR(std::int64_t total_steps) : total_steps_(total_steps) {}
  /// Fraction of the steps during which the rate rises, in [0, 1].
  TORCH_ARG(double, pct_start) = 0.3;
  TORCH_ARG(AnnealStrategy, anneal_strategy) = AnnealStrategy::cos;
  /// base / initial rate, above 0.
  TORCH_ARG(double, div_factor) = 25;
  /// Initial rate / final rate, above 0.
  TORCH_ARG(double, final_div_factor) = 1e4;
  /// Whether the rate falls to the initial rate first, in as many steps as it rose, and only then
  /// to the final one. pct_start is then at most 0.5.
  TORCH_ARG(bool, three_phase) = false;

 public:
  double lr(double base_lr, std::int64_t step) const;
  void check() const;
  std::optional<std::int64_t> total_steps() const { return total_steps_; }

 private:
  double between(double from, double to, double fraction) const;
  std::int64_t total_steps_;
};

/// The base rate times the result of a function, for any other rule:
///
///     optim::LambdaLR([](std::int64_t step) { return std::pow(0.99, step); })
class LambdaLR {
 public:
  using Factor = std::function<double(std::int64_t step)>;
  explicit LambdaLR(Factor factor) : factor_(std::move(factor)) {}
  double lr(double base_lr, std::int64_t step) const { return base_lr * factor_(step); }
  /// Error for an empty function.
  void check() const;

 private:
  Factor factor_;
};

/// One schedule after another, such as a warm-up and a decay:
///
///     optim::SequentialLR({optim::LinearLR(500), optim::CosineAnnealingLR(9500)}, {500})
///
/// Each schedule counts its own steps from 0, and starts from the base rate, not from the rate that
/// the previous schedule reached. Error if a schedule ends before the next one starts.
class SequentialLR {
 public:
  /// @param milestones  the step at which each schedule but the first starts: above 0, ascending
  SequentialLR(std::vector<LRSchedule> schedules, std::vector<std::int64_t> milestones)
      : schedules_(std::move(schedules)), milestones_(std::move(milestones)) {}
  double lr(double base_lr, std::int64_t step) const;
  void check() const;
  std::optional<std::int64_t> total_steps() const;

 private:
  std::vector<LRSchedule> schedules_;
  std::vector<std::int64_t> milestones_;
};

}  // namespace semitone::optim
