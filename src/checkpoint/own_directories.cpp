#include "src/checkpoint/own_directories.h"

#include <mutex>
#include <set>

namespace semitone::checkpoint {
namespace {

struct OwnDirectories {
  std::mutex mutex;
  std::set<std::filesystem::path> all;
};

OwnDirectories& own_directories() {
  // Never destroyed: a Checkpoint in static storage may be destroyed later.
  static auto* const own = new OwnDirectories;
  return *own;
}

}  // namespace

void note_own(const std::filesystem::path& directory) {
  OwnDirectories& own = own_directories();
  const std::scoped_lock lock(own.mutex);
  own.all.insert(directory);
}

bool is_own(const std::filesystem::path& directory) {
  OwnDirectories& own = own_directories();
  const std::scoped_lock lock(own.mutex);
  return own.all.contains(directory);
}

}  // namespace semitone::checkpoint
