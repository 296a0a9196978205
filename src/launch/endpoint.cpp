#include "src/launch/endpoint.h"

#include "semitone/core/error.h"
#include "src/core/parse_number.h"

#include <fmt/format.h>

namespace semitone::launch {
namespace {

constexpr auto kEndpoint = "launch.options";

}  // namespace

std::string Endpoint::to_string() const {
  const bool colons = host.find(':') != std::string::npos;
  return colons ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

Endpoint Endpoint::parse(std::string_view text) {
  const auto wrong = [&] {
    return Error(kEndpoint, "an endpoint as in node0:29400 or [::1]:29400",
                 fmt::format("'{}'", text));
  };
  Endpoint result;
  std::string_view rest = text;
  if (rest.starts_with('[')) {
    const auto end = rest.find(']');
    if (end == std::string_view::npos) throw wrong();
    result.host = rest.substr(1, end - 1);
    rest.remove_prefix(end + 1);
  } else {
    result.host = rest.substr(0, rest.find(':'));
    rest.remove_prefix(result.host.size());
  }
  if (result.host.empty()) throw wrong();
  if (rest.empty()) return result;
  const auto port = parse_number<int>(rest.substr(1));
  if (rest.front() != ':' || !port.has_value() || *port < 0 || *port > 65535) throw wrong();
  result.port = *port;
  return result;
}

}  // namespace semitone::launch
