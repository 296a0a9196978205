#pragma once

#include "src/report/value_counts.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// What the files of a RunLog say of a run. Their formats are in docs/run_records.md.
namespace semitone::report {

// Seconds or bytes by name.
using Amounts = std::map<std::string, double, std::less<>>;

struct RunParameter {
  std::string name;
  std::string layer;
  std::string layer_type;  // "Conv2d"; empty if unknown
  std::vector<std::int64_t> shape;
  std::string dtype;  // Python's name

  std::int64_t numel() const;
};

// What a tensor of a step held.
struct RunTensor {
  std::string what;  // "weight", "gradient", "output" or "output_gradient"
  std::string name;  // a parameter's, or a layer's for outputs
  ValueCounts values;
};

// What a step changed of a parameter.
struct RunUpdate {
  std::string name;
  std::optional<double> ratio;  // norm of the update / norm of the weight
  std::int64_t changed = 0;     // elements
  std::int64_t lost_float16 = 0;
  std::int64_t lost_bfloat16 = 0;
  bool has_master = false;
};

// An operator, with its calls in a step.
struct RunOperator {
  std::string name;    // "conv2d"
  std::string pass;    // "forward", "backward", "optimizer" or "other"
  std::string dtype;   // Python's name; empty if it has none
  std::string kernel;  // "native", "emulated" or "semitone"
  std::int64_t calls = 0;
  double seconds = 0;
  double bytes = 0;
  std::int64_t casts = 0;
  std::int64_t cached_casts = 0;
  double cast_bytes = 0;
};

// The largest step that records hold.
inline constexpr std::int64_t kLargestStep = std::int64_t{1} << 53;

// A layer of batch norm, in a step.
struct RunBatchNorm {
  std::string layer;
  bool training = false;  // with the statistics of the batch
  std::string dtype;      // of the running statistics, Python's name; empty: it has none
};

// A group of an optimizer's parameters.
struct RunOptimizerGroup {
  std::string optimizer;  // "Adam"
  // By its options; not the optimizer's name where that gives parts of the groups to another one.
  std::string rule;
  std::string dtype;  // of its parameters, Python's name; empty if it has none
  std::optional<double> eps;
};

// A step that was looked at.
struct RunSample {
  std::int64_t step = 0;
  bool is_first_of_start = false;
  std::string settings;  // of its start: the level and the dtype, as text; empty: unknown
  std::optional<double> loss_scale;
  bool skipped = false;
  double seconds = 0;
  Amounts phases;
  Amounts memory;
  std::vector<RunTensor> tensors;
  std::vector<RunUpdate> updates;
  std::vector<RunOperator> operators;
  std::vector<RunBatchNorm> batch_norms;

  // The power of two that the gradients of its backward pass were multiplied by.
  int scale_exponent() const;
};

struct SkippedStep {
  std::int64_t step = 0;
  std::string parameter;  // empty if the gradient is that of another rank
  std::int64_t non_finite = 0;
  std::int64_t consecutive = 0;
  double loss_scale = 0;  // in force in the step
  bool is_exact = true;   // false: one of the steps up to this one, of which several may be skipped
};

// The loss scale after a step, at the first step and where it changed.
struct ScaleChange {
  std::int64_t loss_id = 0;
  std::optional<double> before;
  double after = 0;
};

// run.json: the settings of the last start, the time of the first.
struct RunInfo {
  std::filesystem::path directory;
  std::int64_t rank = 0;
  std::int64_t world_size = 1;
  std::string started;
  std::string ended;  // empty while it runs
  std::string outcome = "running";
  std::string reason;
  std::int64_t starts = 0;
  std::string processor;
  std::string device;  // "cpu"; empty without a Recorder
  std::int64_t threads = 0;
  std::int64_t cores = 0;           // that the process may run on; 0: unknown
  std::int64_t physical_cores = 0;  // of these; 0: unknown
  std::int64_t all_cores = 0;
  std::optional<double> cpu_quota;    // cores' worth of time that the control group gets
  std::int64_t local_world_size = 0;  // processes on this machine; 0: unknown
  std::string semitone;
  std::string libtorch;
  std::map<std::string, std::string> config;
  std::string opt_level;    // "O1"; empty if the settings do not tell
  std::string dtype;        // that of the operators that may be lowered; empty if unknown
  bool has_float8 = false;  // an operator of a sample computed in it
};

struct RunData {
  RunInfo info;
  std::vector<RunParameter> parameters;
  std::vector<RunOptimizerGroup> optimizer_groups;
  std::map<std::int64_t, double> losses;                                       // by step
  std::map<std::pair<std::int64_t, std::int64_t>, ScaleChange> scale_changes;  // step, loss
  std::multimap<std::int64_t, SkippedStep> skipped;                            // by step
  std::map<std::int64_t, RunSample> samples;                                   // by step

  // Of the last start, as in RunSample. Samples of starts with others are left out.
  std::string settings;
  std::int64_t settings_since = 0;  // the step from which on they are in force
  std::int64_t samples_left_out = 0;

  // The steps that have a value: the first and the last. None: first_step is empty.
  std::optional<std::int64_t> first_step;
  std::int64_t last_step = 0;

  // Whether a step was skipped for certain.
  bool was_skipped(std::int64_t step) const;
  // Whether the times of operators are those of the device. On a GPU, the host's calls only queue the
  // work, and these are what a recorder measures.
  bool has_device_times() const { return info.device.empty() || info.device == "cpu"; }
  // The last scale of a loss.
  std::optional<double> last_scale(std::int64_t loss_id) const;

  void see(std::int64_t step);
  // Number of steps from the first to the last; 0 if there is none.
  std::int64_t steps() const;
};

// Reads the run of a directory. FileError if there is none, or for a damaged line.
RunData read_run(const std::filesystem::path& directory);

}  // namespace semitone::report
