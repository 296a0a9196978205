#pragma once

#include "semitone/report/nonfinite_finding.h"

#include <torch/arg.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace semitone::report {

/// Options of NonFiniteCheck.
struct NonFiniteCheckOptions {
  /// Operators whose results may be inf or NaN: "log", "aten::log" or, for one overload, "log.out".
  /// What they call is ignored too. Error if LibTorch has no such operator. Default: none.
  TORCH_ARG(std::vector<std::string>, ignore);
  /// Look in every n-th step only, beginning with the first. At least 1. Default 1.
  TORCH_ARG(std::int64_t, every) = 1;
  /// The number of the first step, for findings. Default 1.
  TORCH_ARG(std::int64_t, first_step) = 1;
  /// The rank of this process, for findings. Default: none.
  TORCH_ARG(std::optional<int>, rank);
};

/// Finds the operator that makes the first inf or NaN of a step:
///
///     report::NonFiniteCheck check(*model);
///     for (auto& batch : loader) {
///       optimizer.zero_grad();
///       const auto loss = loss_of(model->forward(batch.data), batch.target);
///       loss.backward();
///       check.throw_if_found();  // before the weights are NaN, too
///       optimizer.step();
///       check.throw_if_found();  // what the optimizer's operators made
///       check.next_step();       // forgets what is not thrown
///     }
///
/// From its construction to its destruction it looks at the results of all operators that this
/// thread and the threads that work for it (autograd's, at::launch's) call, in the forward and the
/// backward pass. The first finding is kept, and the check then looks no further until next_step().
/// Results, gradients and random numbers are bit for bit the same as without it.
///
/// Rules:
/// - An operator is reported if its result has a kind of value (NaN, +inf or -inf) that none of its
///   arguments has. Numbers count as arguments: full(-inf) and masked_fill(mask, -inf) are not
///   reported, nor is adding such a mask. A NaN that softmax makes of it is.
/// - If an argument is NaN and no operator that was watched made it so, it came from outside: a
///   batch, a parameter, another rank, code without operators, or a step that was not looked at.
///   That is reported as such. So is an infinite parameter, and an infinite gradient that enters a
///   node of the graph. In other tensors infinities are often intended, as in masks; what operators
///   make of them is reported.
/// - Of operators that call others (softmax calls _softmax), the innermost that made the value is
///   reported, with those that called it. What is not seen in the results of the outermost does not
///   count.
/// - What the operators of LibTorch's gradient formulas make counts only if the formula returns it:
///   that of norm divides 0 by 0, and masks the NaN. Those of custom functions always count.
/// - Memory that operators do not initialise (empty, resize_) is not looked at until an operator
///   writes to it. One that writes to a part of it (index_copy_, scatter_) or copies it (clone, to)
///   shows the rest: that may be reported.
/// - Not looked at either are tensors that are sparse, nested, quantized, wrapped by functorch, or
///   not floating point or complex, and what is copied from a device to the CPU, since it may not
///   have arrived.
/// - Of an argument that an operator changes in place, the check knows the kinds of values that were
///   in it, but not how many there were.
/// - Code without operators is not seen, such as Semitone's fused layers, optimizers and
///   collectives. What they make is reported where autograd or the next operator meets it. A custom
///   function may also have passed it on: check its arguments first.
///
/// LibTorch swallows exceptions where operators are watched, so findings are thrown by
/// throw_if_found(), and not inside of the operator.
///
/// Cost: one more pass over each result, and a few microseconds an operator
/// (docs/nonfinite.md has measurements). An operator on a GPU costs a wait for its result. Do not
/// use it while a CUDA graph is captured, which forbids that. Without an object nothing is watched.
///
/// An object belongs to the thread that constructs it. Regions nest: the innermost one looks.
class NonFiniteCheck {
 public:
  /// Names no parameters. Error for options out of range.
  explicit NonFiniteCheck(const NonFiniteCheckOptions& options = {});
  /// Names the parameters, buffers and layers of a model in findings.
  explicit NonFiniteCheck(const torch::nn::Module& model,
                          const NonFiniteCheckOptions& options = {});
  ~NonFiniteCheck();
  NonFiniteCheck(const NonFiniteCheck&) = delete;
  NonFiniteCheck& operator=(const NonFiniteCheck&) = delete;

  /// Names the parameters, buffers and layers of one more model, with a prefix: "generator" makes
  /// "generator.conv1.weight". The model's tensors stay alive as long as this object.
  void add_model(const torch::nn::Module& model, const std::string& prefix = {});

  /// Returns the first finding of this step, if there is one.
  std::optional<NonFiniteFinding> finding() const;
  /// Throws NonFiniteError if there is a finding. Error if a result could not be looked at.
  void throw_if_found() const;

  /// Begins the next step: forgets the finding, and looks again. Call it between two steps.
  void next_step();
  /// Returns the number of the step in progress.
  std::int64_t step() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::report
