#pragma once

#include "semitone/core/events.h"
#include "semitone/report/run_log_options.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace semitone::report {

/// How a run ended, for run.json.
enum class Outcome {
  finished,  ///< the training is complete
  stopped,   ///< it was asked to stop, and can continue
  failed,    ///< an exception ended it
};

/// "finished", "stopped" or "failed".
std::string_view name_of(Outcome outcome);

/// The record of one training run: files in a directory, for spreadsheets, pandas and TensorBoard.
///
///     report::RunLog log("runs/7", report::RunLogOptions().config({{"lr", "0.1"}}));
///     for (std::int64_t step = 1; step <= steps; ++step) {
///       log.set_step(step);
///       …
///       log.add_scalar("train/loss", loss.item<double>());
///     }
///
/// | file | content |
/// |---|---|
/// | `metrics.csv` | scalars, a line each: `step,wall_time,name,value` |
/// | `texts.jsonl` | texts, a line of JSON each: `{"step":…,"wall_time":…,"name":…,"text":…}` |
/// | `samples.jsonl` | loss scales, skipped steps, restarts, and what a Recorder samples |
/// | `events.out.tfevents.TIME.HOST.PID.N` | scalars, histograms, texts: TensorBoard's format |
/// | `run.json` | settings, versions, processor, threads, start, end, and how the run ended |
///
/// `wall_time` is in seconds since 1970, in UTC. A value in metrics.csv is the shortest number that
/// reads back as the same double, or `nan`, `inf` or `-inf`. TensorBoard's format has 32-bit
/// scalars: they are rounded, and numbers beyond fp32's range are infinite there.
///
/// Loss scales and skipped steps are recorded without a call (RunLogOptions::record_events), of
/// MixedPrecision, GradScaler and ScaledLoss in the thread that constructed this object:
/// `amp/loss_scale` at the first step and where it changes (`amp/loss_scale_1` is that of the
/// second loss), `amp/skipped_steps`, their number so far, and the text `amp/skipped_step`, which
/// names the parameter. samples.jsonl has them as lines of the kinds `loss_scale` and `skipped`
/// (docs/run_records.md lists their keys). They belong to the step of set_step(). If it was never called, they wait for
/// the next value that is added with a step, and take its step.
///
/// Lines and records are added whole, with one write of the system for each file. A killed process
/// therefore loses what was in memory (flush_interval), and leaves whole lines. If the system itself
/// stops in the middle of a write, the last line or record may be incomplete: TensorBoard ignores
/// such a record, and the next start removes such a line. A write that fails is taken back. Nothing
/// is flushed to the disk itself: after a power failure, the last seconds can be missing.
///
/// **Resuming.** A RunLog for a directory that has a run continues it: the files of lines grow, and
/// there is another file of events and another `run-2.json`, `run-3.json` …, one for each start.
/// Steps that are trained again, after a rollback or from an earlier checkpoint, appear twice in
/// metrics.csv: the later line counts. TensorBoard shows the later ones: the first set_step() of a
/// continued run, and each that goes back, tells it to drop the steps from there on. Before the
/// first set_step(), the first addition with a step of its own does so too. The line `restart` of
/// samples.jsonl says the same.
///
/// All functions may be called from several threads at once. Construct and destroy the object on
/// one thread, and in the reverse order of other events::Listen scopes.
///
/// A name begins and ends with a visible character, has no control characters, and is UTF-8; a "/"
/// groups in TensorBoard. A step is at least 0. Error otherwise, and after close() for any call but
/// close() and writes(). FileError if a file cannot be written; its lines of that write are lost, the
/// earlier ones stay whole, and the next call tries again.
class RunLog {
 public:
  /// Creates the directory and its files, or continues them.
  ///
  /// FileError if that is impossible, if another process or RunLog writes the same run, or for a
  /// metrics.csv with other columns.
  explicit RunLog(const std::filesystem::path& directory, const RunLogOptions& options = {});
  /// Closes it. The outcome is finished; or failed, if an exception is ending the scope. A file
  /// that cannot be written is a warning in the log.
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  /// The step of what is added from now on without a step, and of events. 0 before the first call.
  /// A Recorder takes it as the beginning of the step (report/recorder.h).
  void set_step(std::int64_t step);

  /// Adds a number.
  void add_scalar(const std::string& name, double value, std::optional<std::int64_t> step = {});

  /// Adds a text, Markdown in TensorBoard. Bytes that are not UTF-8 are replaced.
  void add_text(const std::string& name, const std::string& text,
                std::optional<std::int64_t> step = {});

  /// Adds the distribution of a tensor's values, for TensorBoard only: minimum, maximum, sum, sum of
  /// squares, and counts in TensorBoard's buckets, whose limits are 0, ±1e-12 and each 1.1 times the
  /// one before. Inf and NaN are left out, and counted in the scalar `NAME/non_finite` if there are
  /// any.
  ///
  /// The tensor has any dtype but complex and quantised ones, any layout, and any device that has
  /// fp64. It is read in pieces of 2^20 elements, and two results are read from the device.
  /// Error for a tensor without elements.
  void add_histogram(const std::string& name, const at::Tensor& values,
                     std::optional<std::int64_t> step = {});

  /// Adds a histogram for each parameter of a model, `parameters/NAME`, and for each gradient that
  /// is defined, `gradients/NAME`. This reads the whole model: call it every few hundred steps.
  ///
  /// Gradients are those that the parameters have at this moment. With GradScaler they are multiplied
  /// by the scale until unscale_(). With MixedPrecision they are those that step() will read, from
  /// backward() to step(); after a step with master weights there are none.
  void add_histograms(const torch::nn::Module& model, std::optional<std::int64_t> step = {});

  /// Writes what is in memory.
  void flush();

  /// Writes what is in memory and how the run ended, and releases the files. A second call does
  /// nothing.
  /// @param reason  the text of the error, or the name of the signal
  void close(Outcome outcome = Outcome::finished, std::string_view reason = {});

  /// Whether this process writes: on rank 0, or with RunLogOptions::every_rank.
  bool writes() const;

 private:
  class Impl;
  class EventRecorder;
  friend class Recorder;

  std::shared_ptr<Impl> impl_;
  std::optional<events::Listen> listen_;
  int exceptions_;  // in progress when it was constructed
};

}  // namespace semitone::report
