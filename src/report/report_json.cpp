#include "src/report/report_json.h"

#include "src/report/number_formats.h"
#include "src/report/skips.h"

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <utility>

// Writes the report as JSON. Its keys and their order are in docs/report.md, and the page reads it.
namespace semitone::report {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kReportVersion = 1;

Json text_or_null(const std::string& text) {
  return text.empty() ? Json() : Json(text);
}

Json number_or_null(const std::optional<double>& number) {
  return number.has_value() ? Json(*number) : Json();
}

double ratio(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

Json run_json(const RunData& run) {
  const RunInfo& info = run.info;
  return {{"directory", info.directory.string()},
          {"rank", info.rank},
          {"world_size", info.world_size},
          {"started", text_or_null(info.started)},
          {"ended", text_or_null(info.ended)},
          {"outcome", info.outcome},
          {"reason", info.reason},
          {"starts", info.starts},
          {"steps", run.last_step},
          {"samples", run.samples.size()},
          {"device", text_or_null(info.device)},
          {"processor", info.processor},
          {"threads", info.threads},
          {"opt_level", text_or_null(info.opt_level)},
          {"dtype", text_or_null(info.dtype)},
          {"float8", info.has_float8},
          {"versions", {{"semitone", info.semitone}, {"libtorch", info.libtorch}}},
          {"config", info.config}};
}

Json verdicts_json(const std::vector<Verdict>& verdicts) {
  auto list = Json::array();
  for (const Verdict& verdict : verdicts) {
    list.push_back({{"severity", name_of(verdict.severity)},
                    {"id", verdict.id},
                    {"title", verdict.title},
                    {"detail", verdict.detail},
                    {"remedy", verdict.remedy},
                    {"figure", number_or_null(verdict.figure)},
                    {"unit", verdict.unit},
                    {"where", verdict.where},
                    {"steps", verdict.steps}});
  }
  return list;
}

Json losses_json(const RunData& run) {
  auto list = Json::array();
  for (const auto& [step, loss] : run.losses) list.push_back(Json::array({step, loss}));
  return list;
}

// The scale of the first loss.
Json scales_json(const RunData& run) {
  auto list = Json::array();
  for (const auto& [key, change] : run.scale_changes) {
    if (change.loss_id == 0) list.push_back(Json::array({key.first, change.after}));
  }
  return list;
}

Json skipped_json(const RunData& run) {
  auto list = Json::array();
  for (const ExplainedSkip& one : explain_skips(run)) {
    list.push_back(
        {{"step", one.skip.step},
         {"exact", one.skip.is_exact},
         {"parameter", one.skip.parameter},
         {"non_finite", one.skip.non_finite},
         {"loss_scale", one.skip.loss_scale},
         {"scale_after", one.scale_after.has_value() ? Json(*one.scale_after) : Json()}});
  }
  return list;
}

Json formats_json() {
  auto list = Json::array();
  for (const NumberFormat& format : kNumberFormats) {
    list.push_back({{"name", format.name},
                    {"max_exponent", format.max_exponent},
                    {"min_normal", format.min_normal},
                    {"min_subnormal", format.min_subnormal}});
  }
  return list;
}

Json values_json(const std::optional<ValueCounts>& values) {
  if (!values.has_value()) return {};
  return {{"first_exponent", values->first_exponent},
          {"counts", values->counts},
          {"zeros", values->zeros},
          {"nans", values->nans},
          {"infs", values->infs},
          {"numel", values->numel},
          {"max_abs", values->max_abs},
          {"dtype", values->dtype},
          {"step", values->step},
          {"loss_scale", number_or_null(values->loss_scale)},
          {"samples", values->samples}};
}

// null if there are values that were not counted.
Json shares_json(const AllFormatCounts& counts, const std::optional<ValueCounts>& values) {
  if (values.has_value() && values->non_zero() > 0 && counts.front().total == 0) return {};
  auto shares = Json::object();
  for (std::size_t i = 0; i < counts.size(); ++i) {
    shares[std::string(kNumberFormats[i].name)] = {{"zero", counts[i].zero_share()},
                                                   {"subnormal", counts[i].subnormal_share()},
                                                   {"overflow", counts[i].overflow_share()}};
  }
  return shares;
}

Json lost_json(const ParameterSummary& parameter) {
  if (parameter.updates == 0) return {};
  return {{"float16", ratio(parameter.lost_float16, parameter.changed)},
          {"bfloat16", ratio(parameter.lost_bfloat16, parameter.changed)}};
}

Json parameters_json(const Summary& summary) {
  auto list = Json::array();
  for (const ParameterSummary& parameter : summary.parameters) {
    list.push_back({{"name", parameter.info.name},
                    {"layer", parameter.info.layer},
                    {"layer_type", parameter.info.layer_type},
                    {"dtype", parameter.info.dtype},
                    {"numel", parameter.info.numel()},
                    {"weight", values_json(parameter.weight)},
                    {"gradient", values_json(parameter.gradient)},
                    {"shares", shares_json(parameter.scaled_gradient, parameter.gradient)},
                    {"update_ratio", number_or_null(parameter.update_ratio)},
                    {"lost", lost_json(parameter)},
                    {"updates", parameter.changed}});
  }
  return list;
}

Json layers_json(const Summary& summary) {
  auto list = Json::array();
  for (const LayerSummary& layer : summary.layers) {
    list.push_back(
        {{"name", layer.name},
         {"layer_type", layer.layer_type},
         {"output", values_json(layer.output)},
         {"output_gradient", values_json(layer.output_gradient)},
         {"shares", shares_json(layer.scaled_gradient, layer.output_gradient)},
         {"output_shares",
          shares_json(counts_in_all(layer.output.value_or(ValueCounts()), 0), layer.output)}});
  }
  return list;
}

Json operators_json(const Summary& summary) {
  auto list = Json::array();
  for (const RunOperator& op : summary.operators) {
    const double all = summary.operator_seconds;
    list.push_back({{"name", op.name},
                    {"pass", op.pass},
                    {"dtype", op.dtype},
                    {"kernel", op.kernel},
                    {"calls", op.calls},
                    {"seconds", op.seconds},
                    {"share", all > 0 ? op.seconds / all : 0},
                    {"bytes", op.bytes},
                    {"casts", op.casts},
                    {"cached_casts", op.cached_casts},
                    {"cast_bytes", op.cast_bytes}});
  }
  return list;
}

// Those that were recorded, in the order of their names.
template <typename Names>
Json amounts_json(const Names& names, const Amounts& amounts) {
  auto object = Json::object();
  for (const char* const name : names) {
    if (const auto found = amounts.find(name); found != amounts.end()) object[name] = found->second;
  }
  return object;
}

}  // namespace

Json report_json(const ReportedRun& reported, const ReportedRun* other) {
  const auto& [run, summary, verdicts] = reported;
  Json json{{"format", "semitone-report"},
            {"version", kReportVersion},
            {"run", run_json(run)},
            {"verdicts", verdicts_json(verdicts)},
            {"loss", losses_json(run)},
            {"loss_scale", scales_json(run)},
            {"skipped", skipped_json(run)},
            {"formats", formats_json()},
            {"parameters", parameters_json(summary)},
            {"layers", layers_json(summary)},
            {"operators", operators_json(summary)},
            {"phases", amounts_json(kPhases, summary.phases)},
            {"step_seconds", number_or_null(summary.step_seconds)},
            {"memory", amounts_json(kMemoryParts, summary.memory)}};
  json["compare"] = nullptr;
  if (other == nullptr) return json;
  json["compare"] = report_json(*other, nullptr);
  json["compare"].erase("compare");
  return json;
}

}  // namespace semitone::report
