#pragma once

#include "semitone/checkpoint/checkpoint.h"
#include "src/checkpoint/entry.h"
#include "src/checkpoint/folder.h"
#include "src/checkpoint/manifest.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace semitone::checkpoint {

struct Checkpoint::Impl {
  Impl(std::filesystem::path folder, const CheckpointOptions& given);

  // Error unless the name is valid and new.
  void add(std::unique_ptr<Entry> entry);
  // The default generators of the CPU and of the entries' devices.
  NamedGenerators default_generators() const;

  // save.cpp
  void save(std::int64_t step);
  std::unique_ptr<Staging> stage(std::int64_t step) const;
  std::vector<FileRecord> write_files(std::int64_t step);
  void finish(Staging& staging, const Manifest& manifest);

  // resume.cpp
  std::optional<std::int64_t> resume();
  Manifest verify(std::int64_t step) const;
  const FileRecord* record_of(const Entry& entry, const Manifest& manifest) const;
  void require_fits(const Manifest& manifest) const;
  void load(const Manifest& manifest);

  bool is_first() const { return options.group().rank() == 0; }
  // The rank of the entry's file.
  std::optional<int> rank_of(const Entry& entry) const {
    return entry.is_per_rank() ? std::optional(options.group().rank()) : std::nullopt;
  }

  std::filesystem::path directory;
  CheckpointOptions options;
  std::vector<std::unique_ptr<Entry>> entries;
  std::shared_ptr<MixedPrecisions> mixed = std::make_shared<MixedPrecisions>();
  std::set<std::int64_t> rejected;  // by resume(): damaged
};

}  // namespace semitone::checkpoint
