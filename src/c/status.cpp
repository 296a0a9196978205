#include "src/c/status.h"

#include "semitone/core/error.h"
#include "semitone/core/version.h"
#include "src/core/utf8.h"

#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <string_view>

namespace semitone::c {
namespace {

// Without a destructor: bindings may call functions in destructors of the thread's own objects, after
// those of this library.
constexpr std::size_t kMostBytes = 4096;
thread_local char last_error[kMostBytes] = {};

// Messages quote arguments, which may have any bytes.
SemitoneStatus keep_message(SemitoneStatus status, std::string_view message) noexcept {
  std::size_t size = 0;
  while (!message.empty()) {
    const std::size_t length = utf8_length(message);
    const std::string_view next = length == 0 ? "?" : message.substr(0, length);
    if (size + next.size() >= kMostBytes) break;
    size += next.copy(last_error + size, next.size());
    message.remove_prefix(std::max<std::size_t>(length, 1));
  }
  last_error[size] = '\0';
  return status;
}

}  // namespace

SemitoneStatus note_error(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const CommError& comm_error) {
    return keep_message(SEMITONE_COMM_ERROR, comm_error.what());
  } catch (const DivergedError& diverged_error) {
    return keep_message(SEMITONE_DIVERGED_ERROR, diverged_error.what());
  } catch (const FileError& file_error) {
    return keep_message(SEMITONE_FILE_ERROR, file_error.what());
  } catch (const Error& own_error) {
    return keep_message(SEMITONE_ERROR, own_error.what());
  } catch (const c10::OutOfMemoryError& no_memory) {
    return keep_message(SEMITONE_OTHER_ERROR, no_memory.what_without_backtrace());
  } catch (const c10::Error& libtorch_error) {
    return keep_message(SEMITONE_LIBTORCH_ERROR, libtorch_error.what_without_backtrace());
  } catch (const std::exception& other) {
    return keep_message(SEMITONE_OTHER_ERROR, other.what());
  } catch (...) {
    return keep_message(SEMITONE_OTHER_ERROR, "an exception that is no std::exception");
  }
}

}  // namespace semitone::c

const char* semitone_version() {
  // Never destroyed: programs may ask for it while they end.
  static const auto* const version = new std::string(semitone::version());
  return version->c_str();
}

const char* semitone_libtorch_version() {
  return TORCH_VERSION;
}

const char* semitone_last_error() {
  return semitone::c::last_error;
}

void semitone_free(char* memory) {
  std::free(memory);
}
