#include "apps/semitone/results.h"

#include "apps/semitone/output.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/version.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <ostream>

namespace semitone::cli {
namespace {

using nlohmann::ordered_json;
using train::TrainResult;

constexpr double kMegabyte = 1 << 20;

std::int64_t bytes(double megabytes) {
  return std::llround(megabytes * kMegabyte);
}

ordered_json object_of(const TrainResult& result) {
  return {{"opt_level", amp::name_of(result.opt_level)},
          {"dtype", dtype_name(result.dtype)},
          {"memory_format", train::name_of(result.memory_format)},
          {"epochs", result.epochs},
          {"steps", result.steps},
          {"test_accuracy", result.test_accuracy},
          {"test_loss", result.test_loss},
          {"train_loss", result.train_loss},
          {"images_per_second", result.images_per_second},
          {"ms_per_step", result.ms_per_step},
          {"peak_rss_mb", megabytes(result.peak_rss_bytes)},
          {"peak_tensor_mb", megabytes(result.peak_tensor_bytes)},
          {"skipped_steps", result.skipped_steps},
          {"final_loss_scale", result.final_loss_scale},
          {"seed", result.seed},
          {"processes", result.processes},
          {"threads", result.threads},
          {"versions",
           {{"semitone", version()}, {"libtorch", libtorch_version()}, {"compiler", compiler()}}}};
}

// NaN is null in JSON.
double real(const ordered_json& value) {
  return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}

TrainResult result_of(const ordered_json& object) {
  TrainResult result;
  result.opt_level = amp::parse_opt_level(object.at("opt_level").get<std::string>());
  result.dtype = parse_dtype(object.at("dtype").get<std::string>());
  result.memory_format = train::parse_memory_format(object.at("memory_format").get<std::string>());
  result.epochs = object.at("epochs");
  result.steps = object.at("steps");
  result.test_accuracy = real(object.at("test_accuracy"));
  result.test_loss = real(object.at("test_loss"));
  result.train_loss = real(object.at("train_loss"));
  result.images_per_second = real(object.at("images_per_second"));
  result.ms_per_step = real(object.at("ms_per_step"));
  result.peak_rss_bytes = bytes(object.at("peak_rss_mb"));
  result.peak_tensor_bytes = bytes(object.at("peak_tensor_mb"));
  result.skipped_steps = object.at("skipped_steps");
  result.final_loss_scale = real(object.at("final_loss_scale"));
  result.seed = object.at("seed");
  result.processes = object.at("processes");
  result.threads = object.at("threads");
  return result;
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
    throw Error("cli.train", "a result from the process of a level", error.what());
  }
  return results;
}

void print_table(std::ostream& out, const std::vector<TrainResult>& results) {
  const auto base = std::find_if(results.begin(), results.end(), [](const TrainResult& result) {
    return result.opt_level == amp::OptLevel::O0;
  });
  constexpr auto kHead = "{:<6} {:<9} {:>9} {:>8} {:>9} {:>8} {:>6} {:>9} {:>9} {:>8} {:>11}";
  out << bold(out, fmt::format(kHead, "level", "dtype", "accuracy", "loss", "images/s", "ms/step",
                               "speed", "RSS", "tensors", "skipped", "loss scale"))
      << '\n';
  for (const TrainResult& result : results) {
    const std::string speed =
        base == results.end()
            ? "-"
            : fmt::format("{:.2f}x", result.images_per_second / base->images_per_second);
    out << fmt::format(
        "{:<6} {:<9} {:>7.2f} % {:>8.4f} {:>9.0f} {:>8.2f} {:>6} {:>6.0f} MB {:>6.1f} MB {:>8} "
        "{:>11g}\n",
        amp::name_of(result.opt_level), dtype_name(result.dtype), 100 * result.test_accuracy,
        result.train_loss, result.images_per_second, result.ms_per_step, speed,
        megabytes(result.peak_rss_bytes), megabytes(result.peak_tensor_bytes), result.skipped_steps,
        result.final_loss_scale);
  }
}

}  // namespace semitone::cli
