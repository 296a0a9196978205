#pragma once

#include "semitone/autocast/cast_policy.h"
#include "semitone/autocast/model.h"

#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace semitone::amp {

/// A short training from its start, with the same weights, data and random numbers each time.
///
/// @param policy  the policy of its autocast region (Options::policy at O1); std::nullopt: train in
///                fp32, without a region (O0)
/// @return the loss to compare: for example the mean training loss of the last quarter of the steps,
///         or the loss of some validation data afterwards. NaN or inf: it diverged.
using TuneTraining = std::function<double(const std::optional<CastPolicy>& policy)>;

/// One training of tune.
struct TuneTrial {
  /// What was kept in fp32: operators ("softmax.int") and layers ("head.*", a glob of
  /// CastPolicy::keep_fp32_params).
  std::vector<std::string> kept;
  bool is_fp32 = false;  ///< the whole training
  double loss = 0;
  bool in_band = false;
};

/// Options of tune.
struct TuneOptions {
  /// Largest difference of a loss from that of the training in fp32, as a share of the latter. Above
  /// 0. Default 0.01, 1 %.
  TORCH_ARG(double, band) = 0.01;
  /// Whether single layers are tried in place of an operator that several layers call. Default true.
  TORCH_ARG(bool, layers) = true;
  /// Largest number of trainings; Error if they do not suffice. Default 200.
  TORCH_ARG(std::int64_t, max_trainings) = 200;
  /// Called after each training, for a progress display. Default: none.
  TORCH_ARG(std::function<void(const TuneTrial&)>, on_trial);
};

/// The result of tune.
struct TuneResult {
  /// The given policy, and what has to stay in fp32. Not bound to a model. save() writes it for
  /// `semitone train --policy FILE`; to_code() prints it.
  CastPolicy policy = CastPolicy::none();
  std::vector<std::string> operators;  ///< those that stay in fp32 in addition
  std::vector<std::string> layers;     ///< globs of parameters that stay in fp32 in addition
  double fp32_loss = 0;                ///< of the training in fp32
  double given_loss = 0;               ///< under the given policy
  double loss = 0;                     ///< under the result
  std::vector<TuneTrial> trials;       ///< all trainings, in order

  /// Whether the given policy was in the band already.
  bool is_unchanged() const { return operators.empty() && layers.empty(); }
  /// The result in a few lines, with the losses and the policy as code.
  std::string to_string() const;
};

/// Finds the smallest set of operators and layers to keep in fp32, so that a short training's loss
/// stays within a band around that in fp32:
///
///     const auto result = amp::tune(model, amp::CastPolicy::semitone(torch::kHalf), [&](const auto& policy) {
///       reset(model);                                       // the same start each time
///       return train(model, policy, /*steps=*/200);         // O0 without a policy, else O1 with it
///     });
///     result.policy.save("policy.json");
///
/// Candidates are the operators that compute in 16 bits in the forward pass of the first training
/// under the given policy, on the calling thread. Operators that write to an argument and those that
/// only view memory are none. Bisection finds how many of them, counted from the one that was called
/// last, bring the loss into the band; the last one counted stays. (What an operator computes in
/// fp32 often makes those after it compute in fp32 too, so a later operator is the smaller change.)
/// This goes on with the others until those that stay suffice. Then those that can be left out after
/// all are. Of an operator that remains and that several layers call with their parameters, the same
/// search finds the layers that suffice. For k of n candidates that is about k · (log2 n + 2)
/// trainings. The result is in the band, and without any one of its elements it is not.
///
/// The search assumes that more in fp32 is never worse. If losses depend on chance by as much as the
/// band, the result does too: the training in fp32 is therefore run twice.
///
/// @param model  names the layers; the parameters must be those that the training uses while it runs
///               for the first time under the policy. Layers are left out if they are others.
/// Error if the options are out of range, if the training in fp32 diverges or does not repeat itself
/// within the band, or if the loss is outside of the band even with all candidates in fp32.
TuneResult tune(const Model& model, const CastPolicy& policy, const TuneTraining& train,
                const TuneOptions& options = {});

}  // namespace semitone::amp
