#pragma once

#include <string>
#include <vector>

namespace semitone::test {

// Gives a host's name these numerical addresses, in this order and no others, during its lifetime.
// For programs that contain host_names.cpp, which replaces the C library's getaddrinfo.
class HostName {
 public:
  HostName(std::string name, std::vector<std::string> addresses);
  ~HostName();
  HostName(const HostName&) = delete;
  HostName& operator=(const HostName&) = delete;

 private:
  std::string name_;
};

}  // namespace semitone::test
