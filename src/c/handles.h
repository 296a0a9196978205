#pragma once

#include "src/c/status.h"

#include <memory>
#include <type_traits>

namespace semitone::c {

// Every handle that exists is in a table, with the name of its type. A destroyed handle, one of
// another type and any other address are therefore recognised without reading the memory there.
void add_handle(const void* handle, const char* type);
// Error, with the function's name, unless the handle exists and has this type.
void require_handle(const void* handle, const char* type, const char* function);
void remove_handle(const void* handle) noexcept;

[[noreturn]] void throw_null(const char* what, const char* function);

// Error if a pointer is null. `what` completes "expected a …".
template <typename T>
void require_pointer(const T* pointer, const char* what, const char* function) {
  if (pointer == nullptr) throw_null(what, function);
}

// The object of a handle.
template <typename Handle>
Handle& get(Handle* handle, const char* function) {
  require_handle(handle, std::remove_const_t<Handle>::kType, function);
  return *handle;
}

// Gives a new object to the caller.
template <typename Handle>
void give(std::unique_ptr<Handle> object, Handle** result) {
  add_handle(object.get(), Handle::kType);
  *result = object.release();
}

template <typename Handle>
SemitoneStatus destroy(const char* function, Handle* handle) {
  return run(function, [&](const char* name) {
    if (handle == nullptr) return;
    const std::unique_ptr<Handle> object(&get(handle, name));
    remove_handle(handle);
  });
}

}  // namespace semitone::c
