#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace semitone::launch {

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
  void close();
  // Reading and writing return at once where they would have to wait.
  void set_nonblocking() const;

 private:
  int number_;
};

struct Pipe {
  Descriptor read;
  Descriptor write;
};

// All of them are closed by exec, and have numbers above those of the standard streams, which a
// child replaces. Error if the system gives no more.
Pipe make_pipe();
Descriptor open_null(int flags);
Descriptor above_standard_streams(Descriptor descriptor);

}  // namespace semitone::launch
