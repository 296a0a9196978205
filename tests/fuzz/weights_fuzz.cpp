// weights::read: any file is a dict of tensors or a FileError.

#include "semitone/core/error.h"
#include "semitone/weights/file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int file = ::memfd_create("input", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  if (::ftruncate(file, 0) != 0 || ::pwrite(file, data, size, 0) != static_cast<ssize_t>(size))
    return 0;
  try {
    semitone::weights::read(path);
  } catch (const semitone::FileError&) {
  }
  return 0;
}
