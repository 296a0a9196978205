#include "src/report/summary.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

namespace semitone::report {
namespace {

// The elements of a list by name, in the order in which they were first asked for.
template <typename Element>
class ByName {
 public:
  explicit ByName(std::vector<Element>& elements) : elements_(elements) {}

  // @param fill  fills a new element
  template <typename Fill>
  Element& find(const std::string& name, const Fill& fill) {
    const auto [place, is_new] = places_.try_emplace(name, elements_.size());
    if (is_new) fill(elements_.emplace_back());
    return elements_[place->second];
  }

 private:
  std::vector<Element>& elements_;
  std::map<std::string, std::size_t> places_;
};

void add_values(std::optional<ValueCounts>& sum, const ValueCounts& values) {
  if (!sum.has_value()) sum.emplace();
  sum->add(values);
}

// The exponent of the scale of all gradients of a sample. With several scales, it is not recorded
// which gradient had which. A sample has none if its training has no scale, which is recorded as a
// scale of 1 that never changes.
std::optional<int> common_scale(const RunData& run, const RunSample& sample) {
  const bool is_common = std::ranges::all_of(run.scale_changes, [&](const auto& change) {
    const ScaleChange& scale = change.second;
    const bool is_one = scale.after == 1 && scale.before.value_or(1) == 1;
    return change.first.first < run.settings_since ||
           (scale.loss_id == 0 && (sample.loss_scale.has_value() || is_one));
  });
  return is_common ? std::optional(sample.scale_exponent()) : std::nullopt;
}

void add_scaled(AllFormatCounts& sum, const ValueCounts& values, std::optional<int> scale) {
  if (!scale.has_value()) return;
  const AllFormatCounts scaled = counts_in_all(values, *scale);
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i].add(scaled[i]);
}

// Whether the step updated weights: steps that only accumulate gradients leave them as they are.
bool has_update(const RunSample& sample) {
  if (sample.skipped) return false;
  const auto optimizer = sample.phases.find("optimizer");
  if (optimizer != sample.phases.end() && optimizer->second > 0) return true;
  return std::any_of(sample.updates.begin(), sample.updates.end(),
                     [](const RunUpdate& update) { return update.changed > 0; });
}

// Sums over samples.
class Sums {
 public:
  explicit Sums(const RunData& run)
      : run_(run),
        only_first_ones_(
            std::all_of(run.samples.begin(), run.samples.end(),
                        [](const auto& sample) { return sample.second.is_first_of_start; })),
        parameters_(summary_.parameters),
        layers_(summary_.layers) {
    for (const RunParameter& parameter : run.parameters) {
      parameters_.find(parameter.name,
                       [&](ParameterSummary& summary) { summary.info = parameter; });
      if (!parameter.layer_type.empty()) layer_types_[parameter.layer] = parameter.layer_type;
    }
  }

  void add(const RunSample& sample) {
    std::map<std::string_view, std::int64_t> with_gradient;
    const auto scale = common_scale(run_, sample);
    for (const RunTensor& tensor : sample.tensors) {
      add(tensor, scale);
      if (tensor.what == "gradient") with_gradient[tensor.name] = tensor.values.non_zero();
    }
    const bool is_updated = has_update(sample);
    for (const RunUpdate& update : sample.updates) {
      ParameterSummary& summary = add(update, sample);
      if (update.has_master) continue;
      ++summary.updates_alone;
      summary.changed_alone += update.changed;
      const auto gradient = with_gradient.find(update.name);
      if (!is_updated || gradient == with_gradient.end()) continue;
      summary.with_gradient += gradient->second;
      summary.moved += update.changed;
    }
    if (only_first_ones_ || !sample.is_first_of_start) add_times(sample);
    for (const auto& [name, bytes] : sample.memory) {
      double& most = summary_.memory[name];
      most = std::max(most, bytes);
    }
  }

  Summary result() {
    for (ParameterSummary& parameter : summary_.parameters) {
      const auto ratios = ratios_[parameter.info.name];
      if (ratios.second > 0)
        parameter.update_ratio = ratios.first / static_cast<double>(ratios.second);
    }
    for (auto& [name, seconds] : summary_.phases) seconds /= timed_samples_;
    if (timed_samples_ > 0) summary_.step_seconds = seconds_ / timed_samples_;
    summary_.operators.reserve(operators_.size());
    for (auto& [key, op] : operators_) {
      summary_.operator_seconds += op.seconds;
      summary_.operators.push_back(std::move(op));
    }
    std::sort(summary_.operators.begin(), summary_.operators.end(),
              [](const RunOperator& left, const RunOperator& right) {
                return std::tie(right.seconds, left.name, left.pass, left.dtype, left.kernel) <
                       std::tie(left.seconds, right.name, right.pass, right.dtype, right.kernel);
              });
    return std::move(summary_);
  }

 private:
  void add_times(const RunSample& sample) {
    for (const RunOperator& op : sample.operators) add(op);
    for (const auto& [name, seconds] : sample.phases) summary_.phases[name] += seconds;
    seconds_ += sample.seconds;
    ++timed_samples_;
  }

  ParameterSummary& parameter(const std::string& name, const std::string& dtype) {
    return parameters_.find(name, [&](ParameterSummary& summary) {
      summary.info.name = name;
      summary.info.dtype = dtype;
    });
  }

  void add(const RunTensor& tensor, std::optional<int> scale) {
    if (tensor.what == "weight") {
      add_values(parameter(tensor.name, tensor.values.dtype).weight, tensor.values);
    } else if (tensor.what == "gradient") {
      ParameterSummary& summary = parameter(tensor.name, tensor.values.dtype);
      add_values(summary.gradient, tensor.values);
      add_scaled(summary.scaled_gradient, tensor.values, scale);
    } else if (tensor.what == "output" || tensor.what == "output_gradient") {
      LayerSummary& summary = layers_.find(tensor.name, [&](LayerSummary& layer) {
        layer.name = tensor.name;
        if (const auto type = layer_types_.find(tensor.name); type != layer_types_.end())
          layer.layer_type = type->second;
      });
      add_values(tensor.what == "output" ? summary.output : summary.output_gradient, tensor.values);
      if (tensor.what == "output_gradient")
        add_scaled(summary.scaled_gradient, tensor.values, scale);
    }
  }

  ParameterSummary& add(const RunUpdate& update, const RunSample& sample) {
    ParameterSummary& summary = parameter(update.name, "");
    ++summary.updates;
    summary.changed += update.changed;
    summary.lost_float16 += update.lost_float16;
    summary.lost_bfloat16 += update.lost_bfloat16;
    if (update.ratio.has_value() && std::isfinite(*update.ratio) && !sample.skipped) {
      auto& [sum, number] = ratios_[update.name];
      sum += *update.ratio;
      ++number;
    }
    return summary;
  }

  void add(const RunOperator& op) {
    RunOperator& sum = operators_[{op.name, op.pass, op.dtype, op.kernel}];
    if (sum.name.empty()) sum = {op.name, op.pass, op.dtype, op.kernel};
    sum.calls += op.calls;
    sum.seconds += op.seconds;
    sum.bytes += op.bytes;
    sum.casts += op.casts;
    sum.cached_casts += op.cached_casts;
    sum.cast_bytes += op.cast_bytes;
  }

  const RunData& run_;
  bool only_first_ones_;
  Summary summary_;
  ByName<ParameterSummary> parameters_;
  ByName<LayerSummary> layers_;
  std::map<std::string, std::string> layer_types_;
  std::map<std::string, std::pair<double, std::int64_t>> ratios_;  // sum and number
  std::map<std::tuple<std::string, std::string, std::string, std::string>, RunOperator> operators_;
  double seconds_ = 0;
  int timed_samples_ = 0;
};

}  // namespace

Summary summarize(const RunData& run) {
  Sums sums(run);
  for (const auto& [step, sample] : run.samples) sums.add(sample);
  return sums.result();
}

}  // namespace semitone::report
