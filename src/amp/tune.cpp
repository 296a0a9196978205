#include "semitone/amp/tune.h"

#include "semitone/core/error.h"
#include "src/amp/lowered_operators.h"
#include "src/autocast/model_entries.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>
#include <limits>
#include <map>
#include <set>
#include <utility>

namespace semitone::amp {
namespace {

constexpr auto kTune = "amp.tune";
constexpr auto kTuneReason = "found by tune";

// What may be kept in fp32.
struct Candidate {
  std::string name;
  std::set<std::string> parameters{};  // of a layer, as patterns; of an operator: none
  bool operator==(const Candidate&) const = default;
  auto operator<=>(const Candidate&) const = default;
};
using Candidates = std::vector<Candidate>;

// initialize takes the device from the model, whatever the policy's is.
CastPolicy for_device_of(const Model& model, const CastPolicy& policy) {
  const auto entries = entries_of(model);
  if (entries.empty()) return policy;
  return policy.with_target({entries.front().tensor.device().type(), policy.dtype()});
}

class Search {
 public:
  Search(const Model& model, const CastPolicy& policy, const TuneTraining& train,
         const TuneOptions& options)
      : model_(model), given_(policy), train_(train), options_(options) {
    if (!(options.band() > 0) || !std::isfinite(options.band()))
      throw Error(kTune, "a band above 0", fmt::format("{}", options.band()));
    if (options.max_trainings() < 1)
      throw Error(kTune, "at least 1 training", fmt::format("{}", options.max_trainings()));
    if (policy.is_bound()) {
      throw Error(kTune, "a policy that is not bound to a model", "a bound one",
                  "pass the policy as it was before bind()");
    }
  }

  TuneResult run() {
    train_in_fp32();
    given_ = for_device_of(model_, given_);  // the training may have moved the model
    double given_loss = 0;
    const auto operators = lowered_operators(model_, given_, [&] { given_loss = loss_of({}); });
    Candidates kept;
    if (operators.empty() && !is_in_band({})) {
      throw Error(
          kTune, "operators that compute in 16 bits in the training's region", "none",
          "train on the thread that calls tune, in a region of the given policy, and give a "
          "policy for the training's device");
    }
    if (!is_in_band({})) kept = narrowed_to_layers(smallest(candidates_of(operators)), operators);
    return result(kept, given_loss);
  }

 private:
  // Twice: the second one shows what the difference of two equal trainings is.
  void train_in_fp32() {
    fp32_loss_ = run_training({}, std::nullopt, /*is_fp32=*/true);
    if (!std::isfinite(fp32_loss_)) {
      throw DivergedError(kTune, "a finite loss of the training in fp32",
                          fmt::format("{}", fp32_loss_), "lower the learning rate");
    }
    if (fp32_loss_ == 0) {
      throw Error(kTune, "a loss in fp32 other than 0, of which the band is a share", "0",
                  "return the training loss, or add 1");
    }
    const double again = run_training({}, std::nullopt, /*is_fp32=*/true);
    if (is_near(again)) return;
    throw Error(kTune,
                fmt::format("two trainings in fp32 whose losses agree within {:.3g} %",
                            100 * options_.band()),
                fmt::format("{:.6g} and {:.6g}", fp32_loss_, again),
                "begin each with the same weights, data and random numbers, or widen the band");
  }

  // The last one first: what an operator computes in fp32 is often an argument of the next, which
  // then computes in fp32 too. So the later operator is the smaller change.
  static Candidates candidates_of(const std::vector<LoweredOperator>& operators) {
    Candidates all;
    all.reserve(operators.size());
    for (auto op = operators.rbegin(); op != operators.rend(); ++op) all.push_back({op->name});
    return all;
  }

  // The smallest set among the candidates, in addition to those that are kept anyway.
  Candidates smallest(Candidates candidates, const Candidates& anyway = {}) {
    require_enough(candidates, anyway);
    Candidates kept;
    while (!is_in_band(joined(anyway, kept))) {
      // The shortest prefix that brings the loss into the band, together with those kept so far.
      std::size_t outside = 0;  // this length does not
      std::size_t inside = candidates.size();
      while (inside - outside > 1) {
        const std::size_t middle = outside + (inside - outside) / 2;
        const Candidates prefix(candidates.cbegin(), at(candidates, middle));
        (is_in_band(joined(anyway, joined(kept, prefix))) ? inside : outside) = middle;
      }
      if (inside == 0) throw unsteady();
      kept.push_back(candidates[inside - 1]);
      candidates.resize(inside - 1);
    }
    return without_needless(std::move(kept), anyway);
  }

  static Candidates::const_iterator at(const Candidates& all, std::size_t count) {
    return all.begin() + static_cast<std::ptrdiff_t>(count);
  }

  void require_enough(const Candidates& candidates, const Candidates& anyway) {
    const Candidates all = joined(anyway, candidates);
    if (is_in_band(all)) return;
    throw Error(
        kTune,
        fmt::format("a loss within {:.3g} % of {:.6g} with all {} operators in fp32",
                    100 * options_.band(), fp32_loss_, all.size()),
        fmt::format("{:.6g}", loss_of(all)),
        "widen the band: this training is so sensitive to rounding, or to steps that a loss "
        "scale skips");
  }

  static Error unsteady() {
    return {kTune, "a loss that more fp32 brings nearer to that in fp32", "one that moves away",
            "widen the band, or train for more steps"};
  }

  Candidates without_needless(Candidates kept, const Candidates& anyway) {
    for (std::size_t i = kept.size(); i-- > 0 && kept.size() > 1;) {
      Candidates fewer = kept;
      fewer.erase(at(fewer, i));
      if (is_in_band(joined(anyway, fewer))) kept = std::move(fewer);
    }
    return kept;
  }

  // Layers in place of operators that several layers call.
  Candidates narrowed_to_layers(Candidates kept, const std::vector<LoweredOperator>& operators) {
    if (!options_.layers()) return kept;
    for (const LoweredOperator& op : operators) {
      const auto place = std::find(kept.begin(), kept.end(), Candidate{op.name});
      if (place == kept.end() || op.layers.size() < 2) continue;
      Candidates others = kept;
      others.erase(others.begin() + (place - kept.begin()));
      Candidates layers;
      layers.reserve(op.layers.size());
      for (const auto& [layer, parameters] : op.layers) layers.push_back({layer, parameters});
      // The operator may be sensitive where it has no parameters.
      if (!is_in_band(joined(others, layers))) continue;
      const Candidates needed = smallest(layers, others);
      if (needed.size() < layers.size()) kept = joined(others, needed);
    }
    // A layer in fp32 may do for another operator, too.
    return without_needless(std::move(kept), {});
  }

  static Candidates joined(const Candidates& one, const Candidates& other) {
    Candidates both = one;
    both.insert(both.end(), other.begin(), other.end());
    return both;
  }

  CastPolicy policy_with(const Candidates& kept) const {
    CastPolicy policy = given_;
    for (const Candidate& one : kept) {
      if (one.parameters.empty()) policy.keep_fp32(one.name, kTuneReason);
      for (const std::string& parameter : one.parameters) policy.keep_fp32_params(parameter);
    }
    return policy;
  }

  double loss_of(const Candidates& kept) {
    const std::set<Candidate> key(kept.begin(), kept.end());
    const auto known = losses_.find(key);
    if (known != losses_.end()) return known->second;
    const double loss = run_training(kept, policy_with(kept), /*is_fp32=*/false);
    losses_.emplace(key, loss);
    return loss;
  }

  bool is_in_band(const Candidates& kept) { return is_near(loss_of(kept)); }

  // Of NaN: false.
  bool is_near(double loss) const {
    return std::abs(loss - fp32_loss_) <= options_.band() * std::abs(fp32_loss_);
  }

  double run_training(const Candidates& kept, const std::optional<CastPolicy>& policy,
                      bool is_fp32) {
    if (static_cast<std::int64_t>(trials_.size()) == options_.max_trainings()) {
      throw Error(kTune, fmt::format("a result after {} trainings", options_.max_trainings()),
                  "none yet", "raise TuneOptions::max_trainings, or widen the band");
    }
    TuneTrial trial;
    trial.kept.reserve(kept.size());
    for (const Candidate& one : kept) {
      trial.kept.push_back(
          one.parameters.empty() ? one.name : fmt::format("{}", fmt::join(one.parameters, " ")));
    }
    trial.is_fp32 = is_fp32;
    try {
      trial.loss = train_(policy);
    } catch (const std::exception& error) {
      // Operators that refuse arguments of several dtypes, for example.
      if (kept.empty()) throw;
      trial.loss = std::numeric_limits<double>::quiet_NaN();
      trial.error = error.what();
    }
    trial.in_band = (is_fp32 && trials_.empty()) || is_near(trial.loss);
    trials_.push_back(std::move(trial));
    if (options_.on_trial()) options_.on_trial()(trials_.back());
    return trials_.back().loss;
  }

  TuneResult result(const Candidates& kept, double given_loss) {
    TuneResult result;
    result.policy = policy_with(kept);
    for (const Candidate& one : kept) {
      if (one.parameters.empty()) result.operators.push_back(one.name);
      result.parameters.insert(result.parameters.end(), one.parameters.begin(),
                               one.parameters.end());
    }
    result.fp32_loss = fp32_loss_;
    result.given_loss = given_loss;
    result.loss = loss_of(kept);
    result.trials = trials_;
    return result;
  }

  const Model& model_;
  CastPolicy given_;
  const TuneTraining& train_;
  const TuneOptions& options_;
  double fp32_loss_ = 0;
  std::map<std::set<Candidate>, double> losses_;
  std::vector<TuneTrial> trials_;
};

}  // namespace

TuneResult tune(const Model& model, const CastPolicy& policy, const TuneTraining& train,
                const TuneOptions& options) {
  return Search(model, policy, train, options).run();
}

std::string TuneResult::to_string() const {
  std::string text = fmt::format(
      "loss in fp32 {:.6g}, under the given policy {:.6g}, under the result {:.6g} ({} "
      "trainings)\n",
      fp32_loss, given_loss, loss, trials.size());
  text += is_unchanged() ? "the given policy suffices\n" : "to keep in fp32 in addition:\n";
  for (const std::string& op : operators) text += "  operator " + op + "\n";
  for (const std::string& name : parameters) text += "  parameter " + name + "\n";
  return text + "\n" + policy.to_code() + "\n";
}

}  // namespace semitone::amp
