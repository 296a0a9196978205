#pragma once

#include "semitone/checkpoint/checkpoint.h"
#include "src/checkpoint/entry.h"
#include "src/checkpoint/folder.h"
#include "src/checkpoint/manifest.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace semitone::checkpoint {

// A file that is to be written: from an entry, or from a copy in memory. The function may complete
// the record.
struct PendingFile {
  FileRecord record;
  std::function<void(const Sink&, FileRecord&)> write;
};

struct Checkpoint::Impl {
  Impl(std::filesystem::path folder, const CheckpointOptions& given);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  // Error unless the name is valid and new.
  void add(std::unique_ptr<Entry> entry);
  // The default generators of the CPU and of the entries' devices.
  NamedGenerators default_generators() const;

  // save.cpp
  void save(std::int64_t step, std::optional<double> metric);
  void save_async(std::int64_t step, std::optional<double> metric);
  void wait_for_copy();
  void wait();
  void require_saving(std::int64_t step) const;
  // DivergedError on all ranks if one of them has weights that are inf or NaN. Collective.
  void require_finite() const;
  // Error unless all ranks have entries of the same names. Collective.
  void require_same_entries() const;
  // Error unless the group's ranks have all shares of sharded optimizers. Collective.
  void require_all_shares() const;
  FileRecord new_record(const Entry& entry) const;
  // This rank's files, to be written from the entries.
  std::vector<PendingFile> pending_files() const;
  // The same, to be written from copies in `buffers`, of which some may be deferred.
  std::vector<PendingFile> copies();
  // Writes a checkpoint, in the calling thread. `before_the_end` is called before it is complete.
  void write(const comm::Group& group, Manifest manifest, std::vector<PendingFile> files,
             const std::function<void()>& before_the_end);
  Manifest new_manifest(std::int64_t step, std::optional<double> metric) const;
  std::unique_ptr<Staging> stage(std::int64_t step) const;
  // Returns the records of the files as text.
  std::string write_files(std::int64_t step, std::vector<PendingFile> files) const;
  void finish(Staging& staging, const Manifest& manifest);
  // Of some steps: those whose manifests have a metric, the best first, and those whose manifests
  // could not be read for another reason than damage.
  struct Ranking {
    std::vector<std::int64_t> best;
    std::vector<std::int64_t> unread;
  };
  Ranking ranking_of(const std::vector<std::int64_t>& steps) const;
  // Of these steps, ascending, those beyond the options' limits.
  std::set<std::int64_t> beyond_limits(const std::vector<std::int64_t>& steps) const;

  // resume.cpp
  std::optional<std::int64_t> resume();
  void resume(std::int64_t step);
  void require_same_step(std::int64_t step) const;
  // Of those that rank 0 sees.
  std::optional<std::int64_t> best_step() const;
  // The steps that rank 0 sees.
  std::vector<std::int64_t> common_steps() const;
  Manifest verify(std::int64_t step) const;
  // Verifies on all ranks. Returns the first rank's problem, or an empty text on all of them.
  // FileError if some ranks do not see the checkpoint.
  std::string find_problem(std::int64_t step, Manifest& manifest) const;
  void require_seen_by_all_ranks(std::int64_t step) const;
  void require_same_settings(const Manifest& manifest) const;
  // Whether an entry is loaded from the files of all ranks of the saved run.
  bool is_from_all_ranks(const Entry& entry, const Manifest& manifest) const;
  // The records of the files from which an entry is loaded: those of all ranks, or a single one.
  // Null for a missing file.
  std::vector<const FileRecord*> records_of(const Entry& entry, const Manifest& manifest) const;
  void read(Entry& entry, const Manifest& manifest) const;
  void require_fits(const Manifest& manifest) const;
  void load_if_it_fits(const Manifest& manifest);
  void load(const Manifest& manifest);

  bool is_first() const { return options.group().rank() == 0; }
  // Whether this rank writes the entry's file.
  bool is_mine(const Entry& entry) const { return entry.is_per_rank() || is_first(); }
  // The rank of the entry's file.
  std::optional<int> rank_of(const Entry& entry) const {
    return entry.is_per_rank() ? std::optional(options.group().rank()) : std::nullopt;
  }

  std::filesystem::path directory;
  CheckpointOptions options;
  std::vector<std::unique_ptr<Entry>> entries;
  Settings settings;
  std::shared_ptr<MixedPrecisions> mixed = std::make_shared<MixedPrecisions>();
  std::shared_ptr<Optimizers> optimizers = std::make_shared<Optimizers>();
  std::set<std::int64_t> rejected;  // by resume(): damaged
  // On rank 0, of the last checkpoint that this object has saved or loaded.
  std::optional<std::pair<std::int64_t, std::optional<double>>> saved_metric;

  // The thread that writes the checkpoint of save_async() from copies, and its group. While it runs,
  // other functions wait for it before they use `rejected`.
  CopyBuffers buffers;
  std::optional<comm::Group> background;
  std::shared_ptr<DeferredCopies> deferred;
  std::shared_future<void>
      copying;  // ready when the thread has made the deferred copies, if there are any
  std::future<void> writing;
};

}  // namespace semitone::checkpoint
