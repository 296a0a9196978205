#include "src/c/status.h"

#include "semitone/core/error.h"
#include "semitone/core/version.h"

#include <c10/util/Exception.h>
#include <torch/version.h>

#include <cstdlib>
#include <string>

namespace semitone::c {
namespace {

std::string& last_error() {
  static thread_local std::string message;
  return message;
}

SemitoneStatus keep(SemitoneStatus status, const char* message) noexcept {
  try {
    last_error() = message;
  } catch (...) {
    last_error().clear();  // no memory for the text
  }
  return status;
}

}  // namespace

SemitoneStatus note_error(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const CommError& comm_error) {
    return keep(SEMITONE_COMM_ERROR, comm_error.what());
  } catch (const DivergedError& diverged_error) {
    return keep(SEMITONE_DIVERGED_ERROR, diverged_error.what());
  } catch (const FileError& file_error) {
    return keep(SEMITONE_FILE_ERROR, file_error.what());
  } catch (const Error& own_error) {
    return keep(SEMITONE_ERROR, own_error.what());
  } catch (const c10::Error& libtorch_error) {
    return keep(SEMITONE_LIBTORCH_ERROR, libtorch_error.what_without_backtrace());
  } catch (const std::exception& other) {
    return keep(SEMITONE_OTHER_ERROR, other.what());
  } catch (...) {
    return keep(SEMITONE_OTHER_ERROR, "an exception that is no std::exception");
  }
}

}  // namespace semitone::c

const char* semitone_version() {
  static const std::string version(semitone::version());
  return version.c_str();
}

const char* semitone_libtorch_version() {
  return TORCH_VERSION;
}

const char* semitone_last_error() {
  return semitone::c::last_error().c_str();
}

void semitone_free(char* memory) {
  std::free(memory);
}
