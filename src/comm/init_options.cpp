#include "semitone/comm/init_options.h"

#include "semitone/core/error.h"
#include "src/comm/backends.h"
#include "src/comm/durations.h"
#include "src/comm/network.h"

#include <fmt/format.h>

#include <string>
#include <utility>

namespace semitone::comm {

InitOptions& InitOptions::backend(std::string value) {
  if (value != "auto" && find_backend(value) == nullptr) {
    throw Error(kInitComponent, fmt::format("the backend {} or auto", backend_names()),
                fmt::format("'{}'", value),
                value == "mpi"
                    ? "processes that mpirun starts can use gloo: init(\"env://\") reads "
                      "their variables"
                    : "");
  }
  backend_ = std::move(value);
  return *this;
}
InitOptions& InitOptions::timeout(std::chrono::milliseconds value) {
  if (value.count() <= 0)
    throw Error(kInitComponent, "a timeout above 0", fmt::format("{} ms", value.count()));
  timeout_ = limited(value);
  return *this;
}
InitOptions& InitOptions::interface(std::string value) {
  interface_ = std::move(value);
  return *this;
}
InitOptions& InitOptions::bind_address(std::string value) {
  bind_address_ = std::move(value);
  return *this;
}
InitOptions& InitOptions::rank(int value) {
  rank_ = value;
  return *this;
}
InitOptions& InitOptions::world_size(int value) {
  world_size_ = value;
  return *this;
}
InitOptions& InitOptions::check(CheckLevel value) {
  check_ = value;
  return *this;
}
InitOptions& InitOptions::heartbeat(std::chrono::milliseconds value) {
  if (value.count() < 10)
    throw Error(kInitComponent, "a heartbeat of at least 10 ms",
                fmt::format("{} ms", value.count()));
  heartbeat_ = limited(value);
  return *this;
}
InitOptions& InitOptions::heartbeat_timeout(std::chrono::milliseconds value) {
  if (value.count() < 100) {
    throw Error(kInitComponent, "a heartbeat timeout of at least 100 ms",
                fmt::format("{} ms", value.count()));
  }
  heartbeat_timeout_ = limited(value);
  return *this;
}

}  // namespace semitone::comm
