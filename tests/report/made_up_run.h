#pragma once

#include "tests/support/temporary_folder.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

// Directories of runs with known content, as RunLog and Recorder write them.
namespace semitone::report::made_up {

using Json = nlohmann::ordered_json;

// Values of a tensor: counts[i] values with the exponent first_exponent + i.
inline Json tensor(const std::string& what, const std::string& name, const std::string& dtype,
                   int first_exponent, const std::vector<std::int64_t>& counts,
                   std::int64_t zeros = 0) {
  std::int64_t numel = zeros;
  for (const std::int64_t count : counts) numel += count;
  const double max_abs =
      counts.empty() ? 0 : std::ldexp(1.5, first_exponent + static_cast<int>(counts.size()) - 1);
  return {{"what", what},    {"name", name},       {"dtype", dtype},
          {"numel", numel},  {"zeros", zeros},     {"nans", 0},
          {"infs", 0},       {"max_abs", max_abs}, {"first_exponent", first_exponent},
          {"counts", counts}};
}

inline Json op(const std::string& name, const std::string& dtype, double seconds,
               const std::string& kernel = "native", const std::string& pass = "forward") {
  return {{"name", name},      {"pass", pass},       {"dtype", dtype}, {"kernel", kernel},
          {"calls", 1},        {"seconds", seconds}, {"bytes", 100},   {"casts", 2},
          {"cached_casts", 1}, {"cast_bytes", 5e6}};
}

inline Json sample(std::int64_t step, double loss_scale, const std::vector<Json>& tensors) {
  return {{"step", step},
          {"wall_time", 1000.0 + static_cast<double>(step)},
          {"kind", "sample"},
          {"loss_scale", loss_scale},
          {"skipped", false},
          {"seconds", 0.1},
          {"phases", {{"forward", 0.04}, {"backward", 0.05}, {"other", 0.01}}},
          {"memory", {{"parameters", 1000}, {"activations", 5000}}},
          {"tensors", tensors},
          {"updates", Json::array()},
          {"operators", Json::array()}};
}

inline Json skipped(std::int64_t step, const std::string& parameter, double loss_scale,
                    std::int64_t consecutive = 1) {
  return {{"step", step},         {"wall_time", 1000.0 + static_cast<double>(step)},
          {"kind", "skipped"},    {"parameter", parameter},
          {"non_finite", 1},      {"consecutive", consecutive},
          {"total", consecutive}, {"loss_scale", loss_scale}};
}

inline Json scale(std::int64_t step, double before, double after) {
  return {{"step", step},
          {"wall_time", 1000.0 + static_cast<double>(step)},
          {"kind", "loss_scale"},
          {"loss_id", 0},
          {"before", before},
          {"after", after},
          {"found_inf", after < before}};
}

inline Json restart(std::int64_t step, double wall_time) {
  return {{"step", step}, {"wall_time", wall_time}, {"kind", "restart"}};
}

inline Json model(const std::vector<Json>& parameters) {
  return {{"step", 1},       {"wall_time", 1001.0}, {"kind", "model"},         {"device", "cpu"},
          {"world_size", 1}, {"threads", 2},        {"parameters", parameters}};
}

inline Json parameter(const std::string& layer, const std::string& type,
                      const std::vector<std::int64_t>& shape, const std::string& dtype = "Float") {
  return {{"name", layer + ".weight"},
          {"layer", layer},
          {"layer_type", type},
          {"shape", shape},
          {"dtype", dtype}};
}

// The directory of a run: run.json at once, the rest as it is added.
class MadeUpRun {
 public:
  explicit MadeUpRun(const std::string& dtype = "float16") {
    info_ = {{"start_time", "2026-11-24T01:00:00Z"},
             {"end_time", "2026-11-24T02:00:00Z"},
             {"outcome", "finished"},
             {"config", {{"dtype", dtype}, {"lr", "0.1"}, {"opt-level", "O1"}}},
             {"environment",
              {{"semitone", "0.1.0"},
               {"libtorch", "2.11.0"},
               {"processor", "a processor"},
               {"threads", 2},
               {"rank", 0},
               {"world_size", 1}}}};
    write_info();
  }

  // Sets a value of the environment.
  MadeUpRun& set(const std::string& key, const Json& value) {
    info_["environment"][key] = value;
    write_info();
    return *this;
  }

  const std::filesystem::path& path() const { return folder_.path(); }

  // Adds lines to samples.jsonl.
  MadeUpRun& add(const std::vector<Json>& lines) {
    for (const Json& line : lines) samples_ += line.dump() + "\n";
    return add_text("");
  }
  MadeUpRun& add_text(const std::string& text) {
    samples_ += text;
    semitone::test::write_text(path() / "samples.jsonl", samples_);
    return *this;
  }

  // Adds a line to metrics.csv, of the wall time 1000 s + step.
  MadeUpRun& add_metric(std::int64_t step, const std::string& name, const std::string& value) {
    return add_metrics_text(std::to_string(step) + "," + std::to_string(1000 + step) + ".000," +
                            name + "," + value + "\n");
  }
  MadeUpRun& add_metrics_text(const std::string& text) {
    metrics_ += text;
    semitone::test::write_text(path() / "metrics.csv", metrics_);
    return *this;
  }

 private:
  void write_info() const { semitone::test::write_text(path() / "run.json", info_.dump()); }

  semitone::test::TemporaryFolder folder_;
  Json info_;
  std::string samples_;
  std::string metrics_ = "step,wall_time,name,value\n";
};

}  // namespace semitone::report::made_up
