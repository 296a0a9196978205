#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace semitone {

// The system's words for an errno.
std::string reason_of(int number);

// A file descriptor, closed at the end of its scope.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() { close(); }

  int number() const { return number_; }
  bool is_open() const { return number_ >= 0; }
  int release() { return std::exchange(number_, -1); }
  // Returns whether closing succeeded, with errno otherwise: some file systems (NFS) report a full
  // disk only here.
  bool close();
  // Makes reads and writes return at once instead of waiting.
  void set_nonblocking() const;

 private:
  int number_;
};

// The same with a number above those of the standard streams. If this process has closed one of
// them, the system reuses its number. Error if the system has no more descriptors.
Descriptor above_standard_streams(Descriptor descriptor);

// Writes all bytes to an open file or pipe. Returns whether it succeeded, with errno otherwise.
bool write_all(int number, std::string_view bytes);

}  // namespace semitone
