#include "src/train/checkpoints.h"

#include "semitone/core/error.h"
#include "src/checkpoint/agree.h"
#include "src/checkpoint/folder.h"
#include "src/core/file.h"
#include "src/core/log.h"

#include <torch/types.h>

#include <fmt/format.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace semitone::train {
namespace {

namespace fs = std::filesystem;

constexpr auto kCheckpoints = "train.checkpoints";

// Of TrainOptions::resume_from.
struct Place {
  fs::path directory;
  std::optional<std::int64_t> step;  // none: the newest
};

// The place if the path is the directory of one step, otherwise nothing.
std::optional<Place> place_of_step(const fs::path& path) {
  if (!path.filename().string().starts_with("step-")) return std::nullopt;
  for (const std::int64_t step : checkpoint::steps_in(path.parent_path())) {
    if (checkpoint::complete_path(path.parent_path(), step) == path)
      return Place{path.parent_path(), step};
  }
  return std::nullopt;
}

Place find_place(const fs::path& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  if (error) {
    throw FileError(kCheckpoints, fmt::format("checkpoints to resume from at '{}'", path.string()),
                    error.message(), "--resume auto starts a new run if there are none");
  }
  if (const auto place = place_of_step(real)) return *place;
  if (checkpoint::steps_to_resume_in(real).empty()) {
    throw FileError(kCheckpoints, fmt::format("checkpoints to resume from at '{}'", path.string()),
                    "none",
                    "name a directory that has directories such as step-00000100, or one of these");
  }
  return {path, std::nullopt};
}

// Ends a run that would put its checkpoints into one of another run's.
void require_no_step(const fs::path& directory) {
  std::error_code error;
  const fs::path real = fs::canonical(directory, error);
  const auto place = error ? std::nullopt : place_of_step(real);
  if (!place.has_value()) return;
  throw FileError(
      kCheckpoints, "a directory for the checkpoints of a run",
      fmt::format("'{}', which is the checkpoint of step {}", directory.string(),
                  place->step.value_or(0)),
      fmt::format("name '{}', or pass the checkpoint to --resume", place->directory.string()));
}

// Ends a run that would put its checkpoints among those of another run.
// @param last  the step from which the run continues; none: a new run
void require_no_later(const fs::path& directory, const std::vector<std::int64_t>& steps,
                      std::optional<std::int64_t> last) {
  if (steps.empty() || (last.has_value() && steps.back() <= *last)) return;
  throw FileError(
      kCheckpoints,
      last.has_value()
          ? fmt::format("no checkpoint after step {} in '{}'", *last, directory.string())
          : fmt::format("no checkpoint of another run in '{}'", directory.string()),
      fmt::format("one of step {}", steps.back()),
      "pass --resume auto to continue from it, or choose another --checkpoint-dir");
}

bool is_same_directory(const fs::path& one, const fs::path& other) {
  std::error_code ignored;
  return fs::equivalent(one, other, ignored);
}

// Keeps the options that an optimizer has in this run. The saved run may have had a different eps,
// that of its level: see make_optimizer. The learning rate is set before each step, and all other
// options are equal.
class OwnOptions {
 public:
  explicit OwnOptions(torch::optim::Optimizer& optimizer) : groups_(optimizer.param_groups()) {
    options_.reserve(groups_.size());
    for (const auto& group : groups_) options_.push_back(group.options().clone());
  }
  // Once.
  void put_back() {
    for (std::size_t g = 0; g < groups_.size(); ++g) groups_[g].set_options(std::move(options_[g]));
  }

 private:
  std::vector<torch::optim::OptimizerParamGroup>& groups_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
};

// Calls the function on rank 0, and returns its result on all ranks. If it throws, all throw.
std::string on_rank_0(const comm::Group& group, const std::function<std::string()>& function) {
  std::string result;
  checkpoint::on_all_ranks(group, kCheckpoints, [&] {
    if (group.rank() == 0) result = function();
  });
  return group.broadcast(result);
}

// Each rank's number, in rank order. For groups on any device.
at::Tensor gathered(double mine, const comm::Group& group) {
  std::string bytes(sizeof(mine), '\0');
  std::memcpy(bytes.data(), &mine, sizeof(mine));
  std::vector<double> all;
  for (const std::string& text : group.all_gather(bytes)) {
    all.push_back(0);
    std::memcpy(&all.back(), text.data(), sizeof(double));
  }
  return torch::tensor(all, torch::kDouble);
}

}  // namespace

Checkpoints::Checkpoints(const TrainOptions& options, const Training& training, RunConfig config)
    : options_(options), training_(training), config_(std::move(config)) {
  if (!options.checkpoint_dir().empty()) own_.emplace(make(options.checkpoint_dir()));
}

checkpoint::Checkpoint Checkpoints::make(const fs::path& directory) {
  checkpoint::CheckpointOptions options;
  options.group(options_.group()).copy_in_background(true);
  options.keep(options_.keep() == 0 ? std::nullopt : std::optional(options_.keep()));
  checkpoint::Checkpoint made(directory, options);
  made.add("model", training_.model)
      .add("optimizer", training_.optimizer)
      .add("mixed", training_.mixed)
      .add("divergence_guard", training_.guard)
      .add("gradient_order", training_.replicas)
      .add("loss_sums", loss_sums_)
      .add("loss_count", training_.position.loss_count);
  for (const auto& [name, value] : config_) made.add_setting(name, value);
  return made;
}

std::optional<fs::path> Checkpoints::resume() {
  OwnOptions own_options(training_.optimizer);
  fs::path directory = options_.checkpoint_dir();
  take_lock();
  std::optional<std::int64_t> step;
  if (options_.resume_auto()) {
    step = last_ = own_->resume();
  } else if (!options_.resume_from().empty()) {
    step = resume_from(directory);
  } else {
    require_last(std::nullopt);
  }
  if (!step.has_value()) return std::nullopt;
  own_options.put_back();
  restore_position(*step);
  return checkpoint::complete_path(directory, *step);
}

std::optional<std::int64_t> Checkpoints::roll_back() {
  if (!last_.has_value()) return std::nullopt;
  settle();
  OwnOptions own_options(training_.optimizer);
  loss_sums_ = at::Tensor();  // there may be those of another number of processes
  last_ = own_->resume();
  if (!last_.has_value()) return std::nullopt;  // the first one could not be written
  own_options.put_back();
  restore_position(*last_);
  return last_;
}

// Sets the directory too.
std::optional<std::int64_t> Checkpoints::resume_from(fs::path& directory) {
  const std::string found = on_rank_0(options_.group(), [&] {
    const Place place = find_place(options_.resume_from());
    const bool is_own = own_.has_value() && is_same_directory(place.directory, own_->directory());
    return fmt::format("{} {} {}", is_own ? 1 : 0, place.step.value_or(-1),
                       place.directory.string());
  });
  const bool is_own = found.front() == '1';
  std::size_t length = 0;
  const std::int64_t chosen = std::stoll(found.substr(2), &length);
  directory = found.substr(2 + length + 1);
  std::optional<checkpoint::Checkpoint> other;
  if (!is_own) other.emplace(make(directory));
  checkpoint::Checkpoint& source = is_own ? *own_ : *other;
  std::optional<std::int64_t> step = chosen;
  if (chosen >= 0) {
    source.resume(chosen);
  } else {
    step = source.resume();
  }
  if (is_own) last_ = step;
  // After a search for the newest, all later checkpoints of this directory are damaged.
  if (!is_own || chosen >= 0) require_last(last_);
  return step;
}

void Checkpoints::take_lock() {
  if (!own_.has_value()) return;
  on_rank_0(options_.group(), [&] {
    require_no_step(own_->directory());
    lock_.emplace(own_->directory());
    return std::string();
  });
}

void Checkpoints::require_last(std::optional<std::int64_t> step) const {
  if (!own_.has_value()) return;
  on_rank_0(options_.group(), [&] {
    require_no_later(own_->directory(), own_->steps(), step);
    return std::string();
  });
}

void Checkpoints::restore_position(std::int64_t step) {
  training_.position.step = step;
  // With another number of processes the mean over all of them stays.
  const auto ranks = static_cast<std::int64_t>(options_.group().size());
  training_.position.loss_sum = loss_sums_.numel() == ranks
                                    ? loss_sums_[options_.group().rank()].item<double>()
                                    : loss_sums_.mean().item<double>();
}

void Checkpoints::require_writable() const {
  if (!own_.has_value()) return;
  on_rank_0(options_.group(), [&] {
    // The directory, or the one in which it will be created. "link/.." is where the system finds it.
    std::error_code ignored;
    fs::path place = own_->directory();
    while (!fs::exists(fs::status(place, ignored)) && place.has_relative_path())
      place = place.parent_path();
    if (!fs::is_directory(place, ignored)) {
      throw FileError(kCheckpoints,
                      fmt::format("to write checkpoints in '{}'", own_->directory().string()),
                      "Not a directory", "choose another --checkpoint-dir");
    }
    require_writable_folder(place, kCheckpoints);
    return std::string();
  });
}

void Checkpoints::save() {
  const std::int64_t step = training_.position.step;
  if (!own_.has_value()) return;
  settle();
  if (last_ == step) return;
  loss_sums_ = gathered(training_.position.loss_sum, options_.group());
  own_->save_async(step);
  last_ = step;
}

void Checkpoints::wait_for_copy() {
  if (own_.has_value()) own_->wait_for_copy();
}

std::string Checkpoints::wait() {
  try {
    if (own_.has_value()) own_->wait();
    written_ = last_;
    return {};
  } catch (const CommError&) {
    throw;  // a rank is lost: the training cannot go on
  } catch (const std::exception& error) {
    last_ = written_;
    return checkpoint::message_of(error);
  }
}

void Checkpoints::settle() {
  if (const std::string failure = wait(); !failure.empty()) log()->error("{}", failure);
}

void require_resumable(const TrainOptions& options) {
  if (!options.resume_from().empty()) find_place(options.resume_from());
  if (options.checkpoint_dir().empty()) return;
  require_no_step(options.checkpoint_dir());
  const auto steps = checkpoint::steps_in(options.checkpoint_dir());
  if (!options.resume_auto() && options.resume_from().empty())
    require_no_later(options.checkpoint_dir(), steps, std::nullopt);
}

}  // namespace semitone::train
