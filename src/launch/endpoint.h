#pragma once

#include <string>
#include <string_view>

namespace semitone::launch {

// A host and a port.
struct Endpoint {
  std::string host;
  int port = 29400;

  // Parses "host:port", "[::1]:port", or a host alone. Error for anything else.
  static Endpoint parse(std::string_view text);
  std::string to_string() const;
};

}  // namespace semitone::launch
