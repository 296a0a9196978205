#include "src/weights/input_file.h"

#include "semitone/core/error.h"
#include "src/weights/tensor_bytes.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace semitone::weights {

InputFile::InputFile(const std::filesystem::path& path)
    : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  const std::string expected = "to read '" + path.string() + "'";
  struct stat status{};
  if (!file_.is_open() || ::fstat(file_.number(), &status) != 0)
    throw FileError(kRead, expected, reason_of(errno));
  if (!S_ISREG(status.st_mode)) {
    throw FileError(kRead, expected, S_ISDIR(status.st_mode) ? "a folder" : "not a regular file",
                    "name a file of weights");
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

void InputFile::read(std::uint64_t position, void* buffer, std::size_t size) const {
  auto* next = static_cast<char*>(buffer);
  while (size > 0) {
    const auto came = ::pread(file_.number(), next, size, static_cast<off_t>(position));
    if (came < 0 && errno == EINTR) continue;
    if (came < 0) throw FileError(kRead, "to read " + quoted(), reason_of(errno));
    if (came == 0) {
      throw FileError(kRead, "at least " + std::to_string(position + size) + " bytes" + in(),
                      std::to_string(position), "the file is truncated: copy it again");
    }
    next += came;
    position += static_cast<std::uint64_t>(came);
    size -= static_cast<std::size_t>(came);
  }
}

std::string InputFile::read(std::uint64_t position, std::size_t size) const {
  std::string text(size, '\0');
  read(position, text.data(), size);
  return text;
}

std::string InputFile::quoted() const {
  return "'" + path_.string() + "'";
}

std::string InputFile::in() const {
  return " in " + quoted();
}

void InputFile::refuse(const std::string& expected, const std::string& got,
                       std::string_view remedy) const {
  throw FileError(kRead, expected + in(), got, remedy);
}

}  // namespace semitone::weights
