#include "src/report/samples_file.h"

#include "src/report/number_formats.h"
#include "src/report/record_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace semitone::report {
namespace {

// The exponents of fp64's numbers, which no other format exceeds.
constexpr std::int64_t kLeastExponent = -1074;
constexpr std::int64_t kMostExponent = 1023;

Amounts read_amounts(const RecordFields& line, const char* key) {
  Amounts amounts;
  const auto object = line.object(key);
  if (!object.has_value()) return amounts;
  for (const auto& [name, value] : line.find(key)->items())
    amounts[name] = object->amount(name.c_str());
  return amounts;
}

RunParameter read_parameter(const RecordFields& line) {
  RunParameter parameter{line.text("name"),
                         line.text("layer"),
                         line.text("layer_type"),
                         {},
                         python_dtype(line.text("dtype"))};
  if (const RecordJson* const shape = line.find("shape"); shape != nullptr) {
    if (!shape->is_array()) line.place().refuse("a list of sizes", shape->type_name());
    parameter.shape.reserve(shape->size());
    for (const RecordJson& size : *shape) {
      const RecordJson object{{"size", size}};
      parameter.shape.push_back(RecordFields(object, line.place()).count("size"));
    }
  }
  return parameter;
}

void read_counts(const RecordFields& line, ValueCounts& values) {
  values.first_exponent =
      static_cast<int>(line.integer("first_exponent", kLeastExponent, kMostExponent));
  const RecordJson* const counts = line.find("counts");
  if (counts == nullptr) return;
  const auto room = static_cast<std::size_t>(kMostExponent - values.first_exponent + 1);
  if (!counts->is_array() || counts->size() > room) {
    line.place().refuse(
        fmt::format("a list of at most {} counts", room),
        counts->is_array() ? fmt::format("{}", counts->size()) : std::string(counts->type_name()));
  }
  values.counts.reserve(counts->size());
  for (const RecordJson& count : *counts) {
    const RecordJson object{{"counts", count}};
    values.counts.push_back(RecordFields(object, line.place()).count("counts"));
  }
}

RunTensor read_tensor(const RecordFields& line, const RunSample& sample) {
  RunTensor tensor{line.text("what"), line.text("name"), {}};
  ValueCounts& values = tensor.values;
  values.dtype = python_dtype(line.text("dtype"));
  values.step = sample.step;
  values.loss_scale = sample.loss_scale;
  values.samples = 1;
  values.numel = line.count("numel");
  values.zeros = line.count("zeros");
  values.nans = line.count("nans");
  values.infs = line.count("infs");
  values.max_abs = line.amount("max_abs");
  read_counts(line, values);
  return tensor;
}

RunUpdate read_update(const RecordFields& line, const RunSample& sample) {
  RunUpdate update{line.text("name"), line.number("ratio"), line.count("changed")};
  if (const auto lost = line.object("lost"); lost.has_value()) {
    update.lost_float16 = lost->count("Half");
    update.lost_bfloat16 = lost->count("BFloat16");
  }
  if (line.find("master") != nullptr) {
    update.has_master = line.flag("master");
  } else {  // as versions wrote it that had masters for all weights or for none
    const auto masters = sample.memory.find("masters");
    update.has_master = masters != sample.memory.end() && masters->second > 0;
  }
  return update;
}

RunOperator read_operator(const RecordFields& line) {
  return {line.text("name"),        line.text("pass"),   python_dtype(line.text("dtype")),
          line.text("kernel"),      line.count("calls"), line.amount("seconds"),
          line.amount("bytes"),     line.count("casts"), line.count("cached_casts"),
          line.amount("cast_bytes")};
}

RunSample read_sample(const RecordFields& line, std::int64_t step) {
  RunSample sample;
  sample.step = step;
  sample.loss_scale = line.number("loss_scale");
  sample.skipped = line.flag("skipped");
  sample.seconds = line.amount("seconds");
  sample.phases = read_amounts(line, "phases");
  sample.memory = read_amounts(line, "memory");
  line.for_each("tensors", [&](const RecordFields& tensor) {
    sample.tensors.push_back(read_tensor(tensor, sample));
  });
  line.for_each("updates", [&](const RecordFields& update) {
    sample.updates.push_back(read_update(update, sample));
  });
  line.for_each("operators",
                [&](const RecordFields& op) { sample.operators.push_back(read_operator(op)); });
  line.for_each("batch_norms", [&](const RecordFields& layer) {
    sample.batch_norms.push_back(
        {layer.text("layer"), layer.flag("training"), python_dtype(layer.text("dtype"))});
  });
  return sample;
}

void read_model(const RecordFields& line, RunData& run) {
  run.info.device = line.text("device");
  run.parameters.clear();
  line.for_each("parameters", [&](const RecordFields& parameter) {
    run.parameters.push_back(read_parameter(parameter));
  });
  run.optimizer_groups.clear();
  line.for_each("optimizers", [&](const RecordFields& optimizer) {
    optimizer.for_each("groups", [&](const RecordFields& group) {
      run.optimizer_groups.push_back({optimizer.text("type"), group.text("rule"),
                                      python_dtype(group.text("dtype")), group.number("eps")});
    });
  });
}

void drop_from(std::int64_t step, RunData& run) {
  run.samples.erase(run.samples.lower_bound(step), run.samples.end());
  run.skipped.erase(run.skipped.lower_bound(step), run.skipped.end());
  const std::pair first_change{step, std::numeric_limits<std::int64_t>::min()};
  run.scale_changes.erase(run.scale_changes.lower_bound(first_change), run.scale_changes.end());
}

// A line `loss_scale`. After a resume, `before` is the constructor's scale, which was in force in no
// step: it is a change only if a step has lowered it.
ScaleChange read_scale(const RecordFields& line, const RunData& run) {
  ScaleChange change{line.count("loss_id"), line.number("before"), line.amount("after")};
  const auto last = run.last_scale(change.loss_id);
  if (last.has_value() && change.before != last && !line.flag("found_inf"))
    change.before = change.after;
  return change;
}

SkippedStep read_skipped(const RecordFields& line, std::int64_t step) {
  const bool is_exact = line.find("exact") == nullptr || line.flag("exact");
  return {step,
          line.text("parameter"),
          line.count("non_finite"),
          line.count("consecutive"),
          line.amount("loss_scale"),
          is_exact};
}

// Several optimizers may skip one step. Without a known step, each line is one of its own.
void add_skipped(SkippedStep skipped, RunData& run) {
  if (skipped.is_exact) {
    const auto [first, last] = run.skipped.equal_range(skipped.step);
    const auto same =
        std::find_if(first, last, [](const auto& one) { return one.second.is_exact; });
    if (same != last) run.skipped.erase(same);
  }
  run.skipped.emplace(skipped.step, std::move(skipped));
}

// What lines tell of the lines after them.
struct ReadState {
  std::vector<Restart> restarts;
  bool has_started = false;  // there was no sample since the last line `model`
};

void read_settings(const RecordFields& line, RunData& run) {
  const RecordJson* const found = line.find("settings");
  const std::string settings = found == nullptr ? std::string() : found->dump();
  if (!run.settings.empty() && settings != run.settings)
    run.settings_since = line.integer("step", 0, kLargestStep);
  run.settings = settings;
}

void read_line(const RecordFields& line, RunData& run, ReadState& state) {
  const std::string kind = line.text("kind");
  const std::int64_t step = line.integer("step", 0, kLargestStep);
  if (kind == "sample") {
    RunSample sample = read_sample(line, step);
    sample.is_first_of_start = std::exchange(state.has_started, false);
    sample.settings = run.settings;
    run.samples.insert_or_assign(step, std::move(sample));
  } else if (kind == "model") {
    read_model(line, run);
    read_settings(line, run);
    state.has_started = true;
  } else if (kind == "skipped") {
    add_skipped(read_skipped(line, step), run);
  } else if (kind == "loss_scale") {
    ScaleChange change = read_scale(line, run);
    const auto [place, is_new] = run.scale_changes.try_emplace({step, change.loss_id}, change);
    if (is_new) return;
    // Of several falls one, and not that of a scale that grew and fell again.
    const ScaleChange& earlier = place->second;
    if (earlier.before.value_or(earlier.after) >= earlier.after) change.before = earlier.before;
    place->second = change;
  } else if (kind == "restart") {
    drop_from(step, run);
    Restart restart{step, line.amount("wall_time"), {}};
    if (line.find("metrics_bytes") != nullptr) restart.metrics_bytes = line.count("metrics_bytes");
    state.restarts.push_back(restart);
  }  // a later release may write other kinds
}

}  // namespace

std::vector<Restart> read_samples(const std::filesystem::path& path, RunData& run) {
  ReadState state;
  const auto content = read_record(path);
  if (!content.has_value()) return {};
  for_each_line(path, *content, [&](std::string_view text, const FilePlace& place) {
    const RecordJson json = parse_object(text, place);
    read_line(RecordFields(json, place), run, state);
  });
  return std::move(state.restarts);
}

}  // namespace semitone::report
