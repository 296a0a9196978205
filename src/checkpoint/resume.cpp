// Loading the newest checkpoint that is not damaged. Rank 0 verifies the common files and those of
// ranks that there are no more, and each rank its own. All agree before one of them changes anything.

#include "semitone/core/error.h"
#include "src/checkpoint/agree.h"
#include "src/checkpoint/checkpoint_impl.h"
#include "src/core/log.h"

#include <c10/util/Exception.h>
#include <torch/csrc/jit/frontend/error_report.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <functional>
#include <sstream>
#include <string>
#include <utility>

namespace semitone::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr auto kResume = "checkpoint.resume";

std::string to_words(const std::vector<std::int64_t>& steps) {
  return fmt::format("{}", fmt::join(steps, " "));
}

// "--lr 0.1, --seed 3"
std::string describe(const std::vector<std::string>& names, const Settings& settings) {
  std::vector<std::string> parts;
  for (const std::string& name : names) {
    const auto found = settings.find(name);
    parts.push_back(name + " " + (found == settings.end() ? "not set" : found->second));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::vector<std::int64_t> to_steps(const std::string& words) {
  std::vector<std::int64_t> steps;
  std::istringstream stream(words);
  for (std::int64_t step = 0; stream >> step;) steps.push_back(step);
  return steps;
}

// An undo that fails does not prevent the others.
void try_to(const Entry::Undo& put_back) {
  try {
    put_back();
  } catch (const std::exception& error) {
    log()->error("[{}] expected to put back an earlier state, got {}", kResume, message_of(error));
  }
}

}  // namespace

Manifest Checkpoint::Impl::verify(std::int64_t step) const {
  const auto path = complete_path(directory, step);
  Manifest manifest = read_manifest(path);
  if (manifest.step != step) {
    throw DamageError("checkpoint.verify",
                      fmt::format("step {} in '{}'", step, (path / kManifest).string()),
                      std::to_string(manifest.step));
  }
  const int rank = options.group().rank();
  for (const FileRecord& record : manifest.files) {
    if (record.rank.value_or(0) == rank || (rank == 0 && *record.rank >= options.group().size()))
      verify_file(path / file_name(record.name, record.rank), record);
  }
  return manifest;
}

bool Checkpoint::Impl::is_from_all_ranks(const Entry& entry, const Manifest& manifest) const {
  if (entry.may_be_sharded()) return manifest.find(entry.name(), std::nullopt) == nullptr;
  return entry.is_per_rank() && entry.can_be_resharded() &&
         manifest.world_size != options.group().size();
}

std::vector<const FileRecord*> Checkpoint::Impl::records_of(const Entry& entry,
                                                            const Manifest& manifest) const {
  if (!is_from_all_ranks(entry, manifest)) {
    const bool is_whole = entry.may_be_sharded();
    return {manifest.find(entry.name(), is_whole ? std::nullopt : rank_of(entry))};
  }
  std::vector<const FileRecord*> records;
  for (int rank = 0; rank < manifest.world_size; ++rank) {
    records.push_back(manifest.find(entry.name(), rank));
    if (records.back() == nullptr) break;  // world_size may be any number
  }
  return records;
}

void Checkpoint::Impl::require_same_settings(const Manifest& manifest) const {
  Settings all = settings;
  all.insert(manifest.settings.begin(), manifest.settings.end());
  std::vector<std::string> differing;
  for (const auto& [name, unused] : all) {
    const auto here = settings.find(name);
    const auto saved = manifest.settings.find(name);
    if (here == settings.end() || saved == manifest.settings.end() || here->second != saved->second)
      differing.push_back(name);
  }
  if (differing.empty()) return;
  throw FileError(kResume,
                  fmt::format("{} in '{}'", describe(differing, settings),
                              complete_path(directory, manifest.step).string()),
                  describe(differing, manifest.settings),
                  "resume with the settings of the saved run, or choose another directory");
}

void Checkpoint::Impl::require_fits(const Manifest& manifest) const {
  require_same_settings(manifest);
  const std::string path = complete_path(directory, manifest.step).string();
  const bool same_ranks = manifest.world_size == options.group().size();
  for (const auto& entry : entries) {
    if (!same_ranks && entry->is_per_rank() && !entry->may_be_missing() &&
        !entry->can_be_resharded()) {
      throw FileError(kResume,
                      fmt::format("{} ranks in '{}', since each rank has its own '{}'",
                                  options.group().size(), path, entry->name()),
                      std::to_string(manifest.world_size),
                      "resume with the number of ranks of the saved run");
    }
    for (const FileRecord* const record : records_of(*entry, manifest)) {
      if (record == nullptr && entry->may_be_missing()) continue;
      if (record == nullptr || record->kind != entry->kind()) {
        throw FileError(kResume,
                        fmt::format("'{}' ({}) in '{}'", entry->name(), entry->kind(), path),
                        record == nullptr ? "none" : record->kind,
                        "add() the objects of the saved run, under the same names");
      }
      entry->require_fits(*record, path + "/" + file_name(record->name, record->rank));
    }
  }
  for (const FileRecord& record : manifest.files) {
    const bool is_known = std::any_of(entries.begin(), entries.end(), [&](const auto& entry) {
      return entry->name() == record.name;
    });
    if (is_known || record.kind == "default_generators") continue;
    throw FileError(kResume, fmt::format("the objects in '{}'", path),
                    fmt::format("none for '{}' ({})", record.name, record.kind),
                    "add() the objects of the saved run, under the same names");
  }
}

void Checkpoint::Impl::read(Entry& entry, const Manifest& manifest) const {
  const auto records = records_of(entry, manifest);
  const auto folder = complete_path(directory, manifest.step);
  std::vector<fs::path> paths;
  for (const FileRecord* const record : records) {
    if (record != nullptr) paths.push_back(folder / file_name(record->name, record->rank));
  }
  if (paths.empty()) return;
  const auto fail = [&](const std::exception& error) {
    throw FileError(kResume,
                    fmt::format("a state for '{}' in '{}'", entry.name(), paths.front().string()),
                    message_of(error), "was it saved from the same kind of object?");
  };
  try {
    if (is_from_all_ranks(entry, manifest)) {
      entry.read_resharded({paths.begin(), paths.end()});
    } else {
      entry.read(Source(paths.front()), *records.front());
    }
  } catch (const c10::Error& error) {
    fail(error);
  } catch (const torch::jit::ErrorReport& error) {
    fail(error);
  }
}

void Checkpoint::Impl::load(const Manifest& manifest) {
  std::vector<Entry::Undo> undo;
  try {
    on_all_ranks(options.group(), kResume, [&] {
      // In the reverse order: what reads an optimizer's state comes before the optimizer.
      for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry)
        undo.insert(undo.begin(), (*entry)->set_aside());
      for (const auto& entry : entries) read(*entry, manifest);
    });
  } catch (...) {
    for (const Entry::Undo& put_back : undo) try_to(put_back);
    throw;
  }
  for (const auto& entry : entries) {
    const FileRecord* const record = records_of(*entry, manifest).front();
    if (record == nullptr) continue;
    entry->after_reading();
    const std::string lost = entry->not_restored(*record);
    if (!lost.empty() && is_first()) log()->warn("[{}] {}", kResume, lost);
  }
  saved_metric = {manifest.step, manifest.metric};
}

std::vector<std::int64_t> Checkpoint::Impl::common_steps() const {
  std::vector<std::int64_t> steps;
  on_all_ranks(options.group(), kResume, [&] {
    if (is_first()) steps = steps_to_resume_in(directory);
  });
  return to_steps(options.group().broadcast(to_words(steps)));
}

std::string Checkpoint::Impl::find_problem(std::int64_t step, Manifest& manifest) const {
  std::string problem;
  on_all_ranks(options.group(), kResume, [&] {
    try {
      manifest = verify(step);
    } catch (const DamageError& error) {
      problem = message_of(error);
    }
  });
  problem = first_text(options.group(), problem);
  if (!problem.empty()) require_seen_by_all_ranks(step);
  return problem;
}

// Otherwise a directory that is not shared, or not mounted on one machine, would be taken for
// damage, and the next save would delete the checkpoints in it.
void Checkpoint::Impl::require_seen_by_all_ranks(std::int64_t step) const {
  const auto path = complete_path(directory, step) / kManifest;
  std::error_code ignored;
  const auto seen = options.group().all_gather(fs::exists(path, ignored) ? "yes" : "no");
  const auto blind = std::ranges::find(seen, "no");
  if (blind == seen.end() || std::ranges::find(seen, "yes") == seen.end()) return;
  throw FileError(kResume, fmt::format("'{}' on all ranks", path.string()),
                  fmt::format("none on rank {}", blind - seen.begin()),
                  "name a directory of a file system that all machines share");
}

void Checkpoint::Impl::load_if_it_fits(const Manifest& manifest) {
  on_all_ranks(options.group(), kResume, [&] { require_fits(manifest); });
  load(manifest);
}

void Checkpoint::Impl::require_same_step(std::int64_t step) const {
  const auto all = options.group().all_gather(std::to_string(step));
  if (std::ranges::adjacent_find(all, std::ranges::not_equal_to()) == all.end()) return;
  throw Error(kResume, "the same step on all ranks", fmt::format("{}", fmt::join(all, ", ")),
              "best_step() and steps() of one rank, for all of them");
}

std::optional<std::int64_t> Checkpoint::Impl::best_step() const {
  std::vector<std::int64_t> best;
  on_all_ranks(options.group(), kResume, [&] {
    if (!is_first()) return;
    std::vector<std::int64_t> steps = steps_in(directory);
    std::erase_if(steps, [&](std::int64_t step) { return rejected.contains(step); });
    best = ranking_of(steps).best;
    best.resize(std::min<std::size_t>(best.size(), 1));
  });
  best = to_steps(options.group().broadcast(to_words(best)));
  return best.empty() ? std::nullopt : std::optional(best.front());
}

void Checkpoint::Impl::resume(std::int64_t step) {
  require_same_step(step);
  const auto steps = common_steps();
  if (std::find(steps.begin(), steps.end(), step) == steps.end()) {
    throw FileError(kResume,
                    fmt::format("a checkpoint of step {} in '{}'", step, directory.string()),
                    steps.empty() ? "none" : fmt::format("only {}", fmt::join(steps, ", ")));
  }
  Manifest manifest;
  const std::string problem = find_problem(step, manifest);
  if (!problem.empty()) {
    throw FileError(
        kResume,
        fmt::format("an undamaged checkpoint in '{}'", complete_path(directory, step).string()),
        problem, "resume from another step, or restore a backup");
  }
  load_if_it_fits(manifest);
}

std::optional<std::int64_t> Checkpoint::Impl::resume() {
  rejected.clear();
  const auto steps = common_steps();
  std::string first_problem;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    Manifest manifest;
    const std::string problem = find_problem(*step, manifest);
    if (problem.empty()) {
      load_if_it_fits(manifest);
      return *step;
    }
    if (first_problem.empty()) first_problem = problem;
    rejected.insert(*step);
    if (is_first())
      log()->warn("the checkpoint of step {} is damaged, and is not used: {}", *step, problem);
  }
  if (steps.empty()) return std::nullopt;
  throw FileError(kResume, fmt::format("an undamaged checkpoint in '{}'", directory.string()),
                  fmt::format("{} damaged, of which the newest: {}", steps.size(), first_problem),
                  "restore a backup, or choose another directory");
}

}  // namespace semitone::checkpoint
