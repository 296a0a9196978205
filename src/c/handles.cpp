#include "src/c/handles.h"

#include "semitone/core/error.h"

#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace semitone::c {
namespace {

struct Table {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> types;
};

// Never destroyed: programs may destroy handles while they end.
Table& table() {
  static auto* const all = new Table;
  return *all;
}

}  // namespace

void add_handle(const void* handle, const char* type) {
  const std::lock_guard lock(table().mutex);
  table().types.emplace(handle, type);
}

void require_handle(const void* handle, const char* type, const char* function) {
  require_pointer(handle, type, function);
  const char* found = nullptr;
  {
    const std::lock_guard lock(table().mutex);
    const auto entry = table().types.find(handle);
    if (entry != table().types.end()) found = entry->second;
  }
  if (found == nullptr) {
    throw Error(function, std::string("a ") + type,
                "a pointer that is no handle, or a handle that was destroyed");
  }
  if (std::string_view(found) != type)
    throw Error(function, std::string("a ") + type, std::string("a ") + found);
}

void remove_handle(const void* handle) noexcept {
  const std::lock_guard lock(table().mutex);
  table().types.erase(handle);
}

void throw_null(const char* what, const char* function) {
  throw Error(function, std::string("a ") + what, "a null pointer");
}

}  // namespace semitone::c
