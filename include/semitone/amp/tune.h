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
///                fp32, without a region (O0).
///                Set the dtype of the options, too: initialize does not take it from the policy
/// @return the loss to compare: for example the mean training loss of the last quarter of the steps,
///         or the loss of some validation data afterwards. NaN or inf: it diverged.
using TuneTraining = std::function<double(const std::optional<CastPolicy>& policy)>;

/// One training of tune.
struct TuneTrial {
  /// Operators ("softmax.int") and layers, by their parameters ("head.bias head.weight"), that were
  /// kept in fp32 in addition to those of the given policy.
  std::vector<std::string> kept;
  bool is_fp32 = false;  ///< whether all of the training ran in fp32, without a region (O0)
  double loss = 0;       ///< what the training returned
  bool in_band = false;  ///< whether the loss is in the band; always true of the first training
  std::string error;     ///< why the training ended with an exception; its loss is NaN then
};

/// Options of tune.
struct TuneOptions {
  /// Largest relative difference from the loss in fp32. Above 0. Default 0.01, that is 1 %.
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
  /// Patterns of parameters that stay in fp32 in addition (CastPolicy::keep_fp32_params).
  std::vector<std::string> parameters;
  double fp32_loss = 0;           ///< of the training in fp32
  double given_loss = 0;          ///< under the given policy
  double loss = 0;                ///< under the result
  std::vector<TuneTrial> trials;  ///< all trainings, in order

  /// Whether the given policy was in the band already.
  bool is_unchanged() const { return operators.empty() && parameters.empty(); }
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
/// under the given policy, on the calling thread, ordered from the one called last to the one called
/// first. (What an operator computes in fp32 often makes those after it compute in fp32 too, so a
/// later operator is the smaller change.) Operators that write to an argument, return views, or only
/// copy are none. Bisection finds the shortest prefix of this list that brings the loss into the
/// band. The last operator of the prefix is needed. The search then repeats among the operators
/// before it in the list, until the operators found suffice. Finally, each operator that proves
/// unnecessary is removed again. Of an operator that remains and that several layers call with their
/// parameters, the same search finds the layers that suffice. The result is in the band, and without
/// any one of its elements it is not.
///
/// For k of n candidates the search over operators needs about 4 + k · (log2 n + 2) trainings. A
/// search over layers adds as many for its layers.
///
/// The search assumes that keeping more in fp32 never makes the loss worse. If losses vary by chance
/// as much as the band is wide, so does the result. The training in fp32 is therefore run twice.
///
/// @param model   names the layers. If the training uses other parameter tensors than the model's in
///                its first run under the policy, single layers are not tried.
/// @param policy  the policy to begin with, for the dtype of the training. Not bound to a model
///
/// DivergedError if the loss in fp32 is not finite. Error if
/// - the options are out of range,
/// - the loss in fp32 is 0, of which there is no percentage,
/// - the loss in fp32 differs between two trainings by more than the band,
/// - no operator computes in 16 bits, and the loss is outside of the band,
/// - the loss is outside of the band even with all candidates in fp32,
/// - keeping more in fp32 moves the loss out of the band again,
/// - max_trainings do not suffice.
TuneResult tune(const Model& model, const CastPolicy& policy, const TuneTraining& train,
                const TuneOptions& options = {});

}  // namespace semitone::amp
