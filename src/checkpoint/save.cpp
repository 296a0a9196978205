// Writing a checkpoint. All ranks write into the partial directory that rank 0 has created. When all
// have finished, rank 0 adds the manifest and renames the directory.

#include "semitone/core/error.h"
#include "src/checkpoint/agree.h"
#include "src/checkpoint/checkpoint_impl.h"
#include "src/checkpoint/files.h"
#include "src/core/file.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace semitone::checkpoint {
namespace {

constexpr auto kSave = "checkpoint.save";

// Of the steps after a new one, those that resume() has not rejected.
std::optional<std::int64_t> later_step(const std::vector<std::int64_t>& steps, std::int64_t step,
                                       const std::set<std::int64_t>& rejected) {
  for (auto other = steps.rbegin(); other != steps.rend() && *other > step; ++other) {
    if (!rejected.contains(*other)) return *other;
  }
  return std::nullopt;
}

}  // namespace

std::unique_ptr<Staging> Checkpoint::Impl::stage(std::int64_t step) const {
  auto staging = std::make_unique<Staging>(directory);
  const auto later = later_step(steps_in(directory), step, rejected);
  if (later.has_value()) {
    throw Error(
        kSave, fmt::format("a step after {}, the newest in '{}'", *later, directory.string()),
        std::to_string(step), "call resume() before the first step, or choose another directory");
  }
  staging->begin(step);
  return staging;
}

std::vector<FileRecord> Checkpoint::Impl::write_files(std::int64_t step) {
  std::vector<FileRecord> records;
  for (const auto& entry : entries) {
    if (!entry->is_per_rank() && !is_first()) continue;
    FileRecord record;
    record.name = entry->name();
    record.kind = entry->kind();
    record.rank = rank_of(*entry);
    NewFile file(partial_path(directory, step) / file_name(record.name, record.rank));
    entry->write([&](const void* data, std::size_t size) { return file.write(data, size); },
                 record);
    file.finish(record);
    records.push_back(std::move(record));
  }
  return records;
}

void Checkpoint::Impl::finish(Staging& staging, const Manifest& manifest) {
  const auto text = to_text(manifest);
  write_file(partial_path(directory, manifest.step) / kManifest, text, kSave);
  staging.commit();
  rejected.erase(manifest.step);
  std::vector<std::int64_t> kept;
  for (const std::int64_t step : steps_in(directory)) {
    if (rejected.contains(step) && step > manifest.step) {
      staging.remove(step);
    } else {
      kept.push_back(step);
    }
  }
  if (!options.keep().has_value()) return;
  const auto keep = static_cast<std::size_t>(*options.keep());
  for (std::size_t i = 0; i + keep < kept.size(); ++i) {
    if (kept[i] != manifest.step) staging.remove(kept[i]);
  }
}

void Checkpoint::Impl::save(std::int64_t step) {
  if (step < 0) throw Error(kSave, "a step of at least 0", std::to_string(step));
  if (entries.size() <= static_cast<std::size_t>(options.default_generators()))
    throw Error(kSave, "objects to save", "none", "call add() first");
  std::unique_ptr<Staging> staging;
  on_all_ranks(options.group(), kSave, [&] {
    if (is_first()) staging = stage(step);
  });
  std::string records;
  on_all_ranks(options.group(), kSave, [&] {
    for (const auto& entry : entries) entry->consolidate();
    records = to_text(write_files(step));
  });
  Manifest manifest{step, options.group().size(), {}};
  for (const std::string& text : options.group().all_gather(records))
    std::ranges::move(records_from(text), std::back_inserter(manifest.files));
  on_all_ranks(options.group(), kSave, [&] {
    if (is_first()) finish(*staging, manifest);
  });
}

}  // namespace semitone::checkpoint
