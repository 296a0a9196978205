// Writing a checkpoint. All ranks write into the partial directory that rank 0 has created. When all
// have finished, rank 0 adds the manifest and renames the directory.

#include "semitone/core/error.h"
#include "src/checkpoint/agree.h"
#include "src/checkpoint/checkpoint_impl.h"
#include "src/checkpoint/files.h"
#include "src/checkpoint/own_directories.h"
#include "src/comm/process_group.h"
#include "src/core/file.h"
#include "src/core/log.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <future>
#include <iterator>
#include <ranges>
#include <string>
#include <system_error>
#include <utility>

namespace semitone::checkpoint {
namespace {

constexpr auto kSave = "checkpoint.save";

template <typename Work>
std::future<void> in_thread(Work&& work) {
  try {
    return std::async(std::launch::async, std::forward<Work>(work));
  } catch (const std::system_error& error) {
    throw Error(kSave, "a thread that writes the files", error.code().message(),
                "allow more processes (ulimit -u, or the container's limit), or call save()");
  }
}

}  // namespace

void Checkpoint::Impl::require_saving(std::int64_t step) const {
  if (step < 0) throw Error(kSave, "a step of at least 0", std::to_string(step));
  if (entries.size() <= static_cast<std::size_t>(options.default_generators()))
    throw Error(kSave, "objects to save", "none", "call add() first");
}

void Checkpoint::Impl::require_finite() const {
  if (options.nonfinite_weights()) return;
  std::string found;
  on_all_ranks(options.group(), kSave, [&] {
    for (const auto& entry : entries)
      if (found.empty()) found = entry->nonfinite_weight();
  });
  found = first_text(options.group(), found);  // perhaps only one rank has it
  if (found.empty()) return;
  throw DivergedError(
      kSave, "finite weights", found,
      "the training has diverged, and earlier checkpoints are kept: resume from the last one, with "
      "a smaller learning rate for example; CheckpointOptions().nonfinite_weights(true) saves such "
      "weights too");
}

// No rank could resume from a file that another one lacks.
void Checkpoint::Impl::require_same_entries() const {
  std::vector<std::string> names;
  names.reserve(entries.size());
  for (const auto& entry : entries) names.push_back(entry->name());
  std::ranges::sort(names);
  const auto all = options.group().all_gather(fmt::format("'{}'", fmt::join(names, "', '")));
  const auto other = std::ranges::find_if(all, [&](const auto& one) { return one != all.front(); });
  if (other == all.end()) return;
  throw Error(
      kSave, "objects of the same names on all ranks",
      fmt::format("{} on rank 0, and {} on rank {}", all.front(), *other, other - all.begin()),
      "call add() on all ranks");
}

void Checkpoint::Impl::require_all_shares() const {
  for (const auto& entry : entries) {
    const auto share = entry->share();
    if (!share.has_value()) continue;
    const auto to_text = [](int number, int count) {
      return fmt::format("{} of {}", number + 1, count);
    };
    const auto shares = options.group().all_gather(to_text(share->number, share->count));
    std::string incomplete;
    for (int number = 0; number < share->count; ++number) {
      if (std::ranges::find(shares, to_text(number, share->count)) == shares.end())
        incomplete = fmt::format("{}", fmt::join(shares, ", "));
    }
    incomplete = first_text(options.group(), incomplete);  // of other ranks' counts, too
    if (incomplete.empty()) continue;
    throw Error(kSave, fmt::format("all shares of '{}' on the ranks of the group", entry->name()),
                incomplete,
                "CheckpointOptions().group() with all ranks of the ZeroRedundancyOptimizer");
  }
}

FileRecord Checkpoint::Impl::new_record(const Entry& entry) const {
  FileRecord record;
  record.name = entry.name();
  record.kind = entry.kind();
  record.rank = rank_of(entry);
  return record;
}

std::vector<PendingFile> Checkpoint::Impl::pending_files() const {
  std::vector<PendingFile> files;
  for (const auto& entry : entries) {
    if (!is_mine(*entry)) continue;
    PendingFile& file = files.emplace_back(new_record(*entry));
    file.write = [&entry](const Sink& sink, FileRecord& record) { entry->write(sink, record); };
  }
  return files;
}

std::vector<PendingFile> Checkpoint::Impl::copies() {
  using When = CopyBuffers::When;
  const When when_steady = options.copy_in_background() ? When::later : When::now;
  buffers.reuse();
  std::vector<PendingFile> files;
  for (const auto& entry : entries) {
    if (!is_mine(*entry)) continue;
    PendingFile& file = files.emplace_back(new_record(*entry));
    entry->save(file.record, [&](Archive& archive) {
      file.write = [copy = archive.copied(buffers, when_steady)](const Sink& sink, FileRecord&) {
        copy.write(sink);
      };
    });
  }
  deferred = std::make_shared<DeferredCopies>(buffers.deferred());
  buffers.finish();
  return files;
}

std::unique_ptr<Staging> Checkpoint::Impl::stage(std::int64_t step) const {
  auto staging = std::make_unique<Staging>(directory);
  std::vector<std::int64_t> steps = steps_in(directory);
  std::erase_if(steps, [&](std::int64_t other) { return rejected.contains(other); });
  if (!steps.empty() && steps.back() > step) {
    throw Error(
        kSave, fmt::format("a step after {}, the newest in '{}'", steps.back(), directory.string()),
        std::to_string(step), "call resume() before the first step, or choose another directory");
  }
  // The keep limit would delete them one by one.
  if (!is_own(directory) && !steps.empty()) {
    throw Error(
        kSave,
        fmt::format("a directory without checkpoints of another run, '{}'", directory.string()),
        fmt::format("step {} in it", steps.back()),
        "call resume() before the first step, or choose another directory");
  }
  staging->begin(step);
  return staging;
}

std::string Checkpoint::Impl::write_files(std::int64_t step, std::vector<PendingFile> files) const {
  std::vector<FileRecord> records;
  for (PendingFile& pending : files) {
    FileRecord& record = pending.record;
    NewFile file(partial_path(directory, step) / file_name(record.name, record.rank));
    pending.write([&](const void* data, std::size_t size) { return file.write(data, size); },
                  record);
    file.finish(record);
    records.push_back(std::move(record));
  }
  return to_text(records);
}

void Checkpoint::Impl::finish(Staging& staging, const Manifest& manifest) {
  write_file(partial_path(directory, manifest.step) / kManifest, to_text(manifest), kSave);
  staging.commit();
  saved_metric = {manifest.step, manifest.metric};
  rejected.erase(manifest.step);
  std::vector<std::int64_t> kept;
  for (const std::int64_t step : steps_in(directory)) {
    if (rejected.contains(step)) {
      staging.remove(step);
    } else {
      kept.push_back(step);
    }
  }
  for (const std::int64_t step : beyond_limits(kept)) {
    if (step != manifest.step) staging.remove(step);
  }
}

Checkpoint::Impl::Ranking Checkpoint::Impl::ranking_of(
    const std::vector<std::int64_t>& steps) const {
  Ranking ranking;
  std::vector<std::pair<double, std::int64_t>> metrics;
  const double sign = options.best() == Best::lowest ? 1 : -1;
  for (const std::int64_t step : steps) {
    try {
      const Manifest manifest = read_manifest(complete_path(directory, step));
      if (manifest.metric.has_value()) metrics.emplace_back(sign * *manifest.metric, -step);
    } catch (const DamageError&) {
      // A damaged checkpoint is not the best.
    } catch (const FileError& error) {
      log()->warn("the metric of step {} cannot be read: {}", step, error.what());
      ranking.unread.push_back(step);
    }
  }
  std::ranges::sort(metrics);
  for (const auto& [metric, step] : metrics) ranking.best.push_back(-step);
  return ranking;
}

std::set<std::int64_t> Checkpoint::Impl::beyond_limits(
    const std::vector<std::int64_t>& steps) const {
  if (!options.keep().has_value()) return {};
  const auto newest = steps.end() - std::min<std::ptrdiff_t>(*options.keep(), std::ssize(steps));
  std::set<std::int64_t> beyond(steps.begin(), newest);
  if (options.keep_best() == 0 || beyond.empty()) return beyond;
  const Ranking ranking = ranking_of(steps);
  for (const std::int64_t step : ranking.best | std::views::take(options.keep_best()))
    beyond.erase(step);
  // One of them may be the best.
  for (const std::int64_t step : ranking.unread) beyond.erase(step);
  return beyond;
}

void Checkpoint::Impl::write(const comm::Group& group, Manifest manifest,
                             std::vector<PendingFile> files,
                             const std::function<void()>& before_the_end) {
  std::unique_ptr<Staging> staging;
  on_all_ranks(group, kSave, [&] {
    if (is_first()) staging = stage(manifest.step);
  });
  std::string records;
  on_all_ranks(group, kSave, [&] {
    records = write_files(manifest.step, std::move(files));
    before_the_end();
  });
  for (const std::string& text : group.all_gather(records))
    std::ranges::move(records_from(text), std::back_inserter(manifest.files));
  on_all_ranks(group, kSave, [&] {
    if (is_first()) finish(*staging, manifest);
  });
  note_own(directory);
}

Manifest Checkpoint::Impl::new_manifest(std::int64_t step, std::optional<double> metric) const {
  // A signal may arrive in a step that was just saved.
  const bool saved_before = saved_metric.has_value() && saved_metric->first == step;
  if (!metric.has_value() && saved_before) metric = saved_metric->second;
  if (metric.has_value() && !std::isfinite(*metric)) metric.reset();
  return {step, options.group().size(), settings, {}, metric};
}

void Checkpoint::Impl::save(std::int64_t step, std::optional<double> metric) {
  wait();
  require_same_entries();
  require_saving(step);
  require_finite();
  require_all_shares();
  write(options.group(), new_manifest(step, metric), pending_files(), [] {});
}

void Checkpoint::Impl::save_async(std::int64_t step, std::optional<double> metric) {
  wait();
  require_same_entries();
  require_saving(step);
  require_finite();
  require_all_shares();
  if (!background.has_value()) background = comm::group_of_cpus(options.group());
  copying = {};
  std::promise<bool> agreement;  // that all ranks have their copies and threads
  std::shared_future<void> copied;
  try {
    on_all_ranks(options.group(), kSave, [&] {
      std::vector<PendingFile> files = copies();
      std::packaged_task<void()> copy([copies = deferred] { copies->run(); });
      copied = copy.get_future().share();
      writing = in_thread([this, manifest = new_manifest(step, metric), files = std::move(files),
                           copies = deferred, copy = std::move(copy), copied,
                           agreed = agreement.get_future()]() mutable {
        if (!agreed.get()) return;
        copy();  // an exception is in `copied`
        on_all_ranks(*background, kSave, [&] { copied.get(); });
        write(*background, std::move(manifest), std::move(files),
              [&] { copies->require_confirmed_if_changed(); });
      });
    });
  } catch (...) {
    agreement.set_value(false);
    writing = {};  // after the end of the thread
    throw;
  }
  agreement.set_value(true);
  if (!deferred->is_empty()) copying = std::move(copied);
}

void Checkpoint::Impl::wait_for_copy() {
  if (!copying.valid()) return;
  copying.wait();
  deferred->confirm();
}

void Checkpoint::Impl::wait() {
  if (writing.valid()) writing.get();
}

Checkpoint::Impl::~Impl() {
  try {
    wait();
  } catch (const std::exception& error) {
    log()->error(message_of(error));
  }
}

}  // namespace semitone::checkpoint
