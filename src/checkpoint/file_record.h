#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace semitone::checkpoint {

// A tensor of an entry, as the manifest describes it.
struct TensorRecord {
  std::string name;  // "conv.weight"
  std::vector<std::int64_t> shape;
  std::string dtype;  // "float32"
};

// A file of a checkpoint. It has one entry: of the whole run, or of one rank.
struct FileRecord {
  std::string name;         // of the entry
  std::string kind;         // of the entry: "module", "optimizer" …
  std::optional<int> rank;  // of an entry with PerRank::yes
  std::uint64_t bytes = 0;
  std::string crc32;  // in hexadecimal
  std::vector<TensorRecord> tensors;
  std::string level;  // of a MixedPrecision: "O2 bfloat16"
};

// The file's name: "model.pt", or "sampler.rank1.pt".
inline std::string file_name(const std::string& name, const std::optional<int>& rank) {
  return rank.has_value() ? name + ".rank" + std::to_string(*rank) + ".pt" : name + ".pt";
}

}  // namespace semitone::checkpoint
