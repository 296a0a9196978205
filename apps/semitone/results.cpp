#include "apps/semitone/results.h"

#include "apps/semitone/help.h"
#include "apps/semitone/output.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/version.h"
#include "src/core/named_rows.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <ostream>

namespace semitone::cli {
namespace {

using nlohmann::ordered_json;
using train::TrainResult;

constexpr auto kResults = "cli.train";
constexpr double kMegabyte = 1 << 20;

std::int64_t bytes(double megabytes) {
  return std::llround(megabytes * kMegabyte);
}

ordered_json object_of(const TrainResult& result) {
  ordered_json object = {
      {"opt_level", amp::name_of(result.opt_level)},
      {"dtype", dtype_name(result.dtype)},
      {"data", result.kind.name},
      {"fp8", result.fp8},
      {"memory_format", train::name_of(result.memory_format)},
      {"epochs", result.epochs},
      {"steps", result.steps},
      {"test_accuracy", result.test_accuracy},
      {"test_loss", result.test_loss},
      {"train_loss", result.train_loss},
      {fmt::format("{}_per_second", result.kind.items), result.items_per_second},
      {"ms_per_step", result.ms_per_step},
      {"train_seconds", result.train_seconds},
      {"peak_rss_mb", megabytes(result.peak_rss_bytes)},
      {"peak_tensor_mb", megabytes(result.peak_tensor_bytes)},
      {"skipped_steps", result.skipped_steps},
      {"loss_spikes", result.loss_spikes},
      {"rollbacks", result.rollbacks},
      {"final_loss_scale", result.final_loss_scale},
      {"seed", result.seed},
      {"processes", result.processes},
      {"threads", result.threads},
      {"versions",
       {{"semitone", version()}, {"libtorch", libtorch_version()}, {"compiler", compiler()}}}};
  if (result.kind.has_perplexity) object["test_perplexity"] = result.test_perplexity();
  return object;
}

// NaN is null in JSON.
double real(const ordered_json& value) {
  return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}

TrainResult result_of(const ordered_json& object) {
  TrainResult result;
  result.opt_level = amp::parse_opt_level(object.at("opt_level").get<std::string>());
  result.dtype = parse_dtype(object.at("dtype").get<std::string>());
  const train::DataKind* const data =
      find_row(train::kDataKinds, object.at("data").get<std::string>());
  if (data == nullptr) throw Error(kResults, "a kind of data", object.at("data").dump());
  result.kind = *data;
  result.fp8 = object.at("fp8");
  result.memory_format = train::parse_memory_format(object.at("memory_format").get<std::string>());
  result.epochs = object.at("epochs");
  result.steps = object.at("steps");
  result.test_accuracy = real(object.at("test_accuracy"));
  result.test_loss = real(object.at("test_loss"));
  result.train_loss = real(object.at("train_loss"));
  result.items_per_second = real(object.at(fmt::format("{}_per_second", result.kind.items)));
  result.ms_per_step = real(object.at("ms_per_step"));
  result.train_seconds = real(object.at("train_seconds"));
  result.peak_rss_bytes = bytes(object.at("peak_rss_mb"));
  result.peak_tensor_bytes = bytes(object.at("peak_tensor_mb"));
  result.skipped_steps = object.at("skipped_steps");
  result.loss_spikes = object.at("loss_spikes");
  result.rollbacks = object.at("rollbacks");
  result.final_loss_scale = real(object.at("final_loss_scale"));
  result.seed = object.at("seed");
  result.processes = object.at("processes");
  result.threads = object.at("threads");
  return result;
}

// A column of the table. If there is no room for all, those with a high rank are omitted.
struct Column {
  int rank;
  int width;     // at least
  bool is_word;  // to the left; numbers go to the right
  std::string head;
  std::function<std::string(const TrainResult&)> cell;
};

std::string percent(double fraction) {
  return fmt::format("{:.2f} %", 100 * fraction);
}

std::vector<Column> test_columns(const train::DataKind& data) {
  if (!data.has_perplexity) {
    return {
        {1, 9, false, "accuracy", [](const TrainResult& r) { return percent(r.test_accuracy); }}};
  }
  return {{1, 10, false, "perplexity",
           [](const TrainResult& r) { return fmt::format("{:.3f}", r.test_perplexity()); }},
          {12, 10, false, "test loss",
           [](const TrainResult& r) { return fmt::format("{:.4f}", r.test_loss); }}};
}

// Returns the names of the omitted columns.
std::string keep_those_that_fit(std::vector<Column>& columns, int terminal) {
  if (terminal <= 0) return {};
  std::vector<Column*> by_rank;
  by_rank.reserve(columns.size());
  for (Column& column : columns) by_rank.push_back(&column);
  std::sort(by_rank.begin(), by_rank.end(),
            [](const Column* one, const Column* other) { return one->rank < other->rank; });
  int used = 0;
  std::string left_out;
  for (Column* const column : by_rank) {
    if (used == 0 || used + column->width < terminal) {
      used += column->width + 1;
    } else {
      left_out += (left_out.empty() ? "" : ", ") + column->head;
      column->width = 0;
    }
  }
  std::erase_if(columns, [](const Column& column) { return column.width == 0; });
  return left_out;
}

}  // namespace

double megabytes(std::int64_t bytes) {
  return static_cast<double>(bytes) / kMegabyte;
}

std::string to_json(const std::vector<TrainResult>& results) {
  auto array = ordered_json::array();
  for (const TrainResult& result : results) array.push_back(object_of(result));
  return array.dump(2);
}

std::vector<TrainResult> from_json(const std::string& text) {
  std::vector<TrainResult> results;
  try {
    for (const ordered_json& object : ordered_json::parse(text))
      results.push_back(result_of(object));
  } catch (const nlohmann::json::exception& error) {
    throw Error(kResults, "a result from the process of a level", error.what());
  }
  return results;
}

void print_table(std::ostream& out, const std::vector<TrainResult>& results, int terminal) {
  const auto base = std::find_if(results.begin(), results.end(), [](const TrainResult& result) {
    return result.opt_level == amp::OptLevel::O0;
  });
  const auto speed = [&](const TrainResult& result) -> std::string {
    // A finished training that is resumed has no steps.
    const bool is_known = base != results.end() && base->ms_per_step > 0 && result.ms_per_step > 0;
    return is_known ? fmt::format("{:.2f}x", base->ms_per_step / result.ms_per_step) : "-";
  };
  const train::DataKind data = results.empty() ? train::kImages : results.front().kind;
  const std::string speed_head = fmt::format("{}/s", data.items);
  std::vector<Column> columns{
      {0, 6, true, "level",
       [](const TrainResult& r) { return std::string(amp::name_of(r.opt_level)); }},
      {6, 9, true, "dtype", [](const TrainResult& r) { return dtype_name(r.dtype); }},
      {4, 8, false, "loss",
       [](const TrainResult& r) { return fmt::format("{:.4f}", r.train_loss); }},
      {8, static_cast<int>(speed_head.size()) + 1, false, speed_head,
       [](const TrainResult& r) { return fmt::format("{:.0f}", r.items_per_second); }},
      {2, 8, false, "ms/step",
       [](const TrainResult& r) { return fmt::format("{:.2f}", r.ms_per_step); }},
      {3, 6, false, "speed", speed},
      {5, 8, false, "time",
       [](const TrainResult& r) { return fmt::format("{:.1f} s", r.train_seconds); }},
      {9, 9, false, "RSS",
       [](const TrainResult& r) { return fmt::format("{:.0f} MB", megabytes(r.peak_rss_bytes)); }},
      {7, 9, false, "tensors",
       [](const TrainResult& r) {
         return fmt::format("{:.1f} MB", megabytes(r.peak_tensor_bytes));
       }},
      {10, 8, false, "skipped",
       [](const TrainResult& r) { return std::to_string(r.skipped_steps); }},
      {11, 11, false, "loss scale",
       [](const TrainResult& r) { return fmt::format("{:g}", r.final_loss_scale); }}};
  const auto of_test = test_columns(data);
  columns.insert(columns.begin() + 2, of_test.begin(), of_test.end());
  const std::string left_out = keep_those_that_fit(columns, terminal);
  const auto row = [&](const std::function<std::string(const Column&)>& cell) {
    std::string line;
    for (const Column& column : columns) {
      const std::size_t width = static_cast<std::size_t>(column.width);
      line += column.is_word ? fmt::format("{:<{}}", cell(column), width)
                             : fmt::format("{:>{}}", cell(column), width);
      line += ' ';
    }
    line.pop_back();
    return line;
  };
  out << bold(out, row([](const Column& column) { return column.head; })) << '\n';
  for (const TrainResult& result : results) {
    out << row([&](const Column& column) { return column.cell(result); }) << '\n';
  }
  if (!left_out.empty()) {
    constexpr int kLeast = 20;  // letters below each other cannot be read
    const auto width = static_cast<std::size_t>(std::max(terminal, kLeast));
    out << wrapped("not shown at this width: " + left_out, width) << '\n';
  }
}

}  // namespace semitone::cli
