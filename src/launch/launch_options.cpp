#include "semitone/launch/launch_options.h"

#include "semitone/core/error.h"
#include "src/core/parse_number.h"
#include "src/core/utf8.h"
#include "src/launch/endpoint.h"
#include "src/launch/limits.h"
#include "src/launch/log_files.h"
#include "src/net/address.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>

namespace semitone::launch {
namespace {

constexpr auto kLaunchOptions = "launch.options";
constexpr std::size_t kMaxToken = 1024;

std::optional<Streams> streams(std::string_view text) {
  const auto value = parse_number<int>(text);
  if (!value.has_value() || *value < 0 || *value > 3) return std::nullopt;
  return static_cast<Streams>(*value);
}

void require(bool right, std::string_view expected, std::string_view got,
             std::string_view remedy = {}) {
  if (!right) throw Error(kLaunchOptions, expected, got, remedy);
}

void require_duration(std::string_view name, LaunchOptions::Seconds value, double least) {
  require(std::isfinite(value.count()) && value.count() >= least && value.count() <= 1e6,
          fmt::format("{} from {} to 1000000 seconds", name, least),
          fmt::format("{}", value.count()));
}

// The value names a folder.
void require_name(std::string_view name, const std::string& value) {
  require(value.empty() || (names_a_folder(value) && is_utf8(value)),
          fmt::format("{} in UTF-8 without '/' that can be the name of a folder", name),
          fmt::format("'{}'", value));
}

// 0.0.0.0 says where node 0 listens, and not where the others find it.
void require_master(const LaunchOptions& options) {
  const std::string host = options.rdzv_endpoint().empty()
                               ? options.master_addr()
                               : Endpoint::parse(options.rdzv_endpoint()).host;
  // A name is looked up when the job starts.
  const bool is_wildcard =
      net::is_numerical(host) && net::address_kind(host).value == net::AddressKind::wildcard;
  require(!is_wildcard || options.nnodes().max == 1 || !options.local_addr().empty(),
          "local-addr with the address " + host, "none",
          "give the address at which the other nodes reach node 0");
}

// Does not show the token.
void require_token(const std::string& token) {
  const bool is_printable =
      std::all_of(token.begin(), token.end(), [](char c) { return c > ' ' && c <= '~'; });
  require(token.size() <= kMaxToken && is_printable,
          fmt::format("an rdzv-token of at most {} printable ASCII characters, without spaces",
                      kMaxToken),
          is_printable ? fmt::format("{}", token.size()) : "one with other characters");
}

}  // namespace

StreamsByRank StreamsByRank::parse(std::string_view text) {
  if (const auto all = streams(text); all.has_value()) return *all;
  StreamsByRank result;
  std::string_view rest = text;
  while (true) {
    const std::string_view item = rest.substr(0, rest.find(','));
    const auto colon = item.find(':');
    const auto rank = parse_number<int>(item.substr(0, colon));
    const auto value =
        colon == std::string_view::npos ? std::nullopt : streams(item.substr(colon + 1));
    require(rank.has_value() && *rank >= 0 && value.has_value(),
            "0, 1, 2 or 3, or those by local rank as in 0:1,1:3", fmt::format("'{}'", text));
    result.by_rank_[*rank] = *value;
    if (item.size() == rest.size()) return result;
    rest.remove_prefix(item.size() + 1);
  }
}

Streams StreamsByRank::of(int local_rank) const {
  const auto found = by_rank_.find(local_rank);
  return found == by_rank_.end() ? all_ : found->second;
}

bool StreamsByRank::any() const {
  if (all_ != Streams::none) return true;
  for (const auto& [rank, value] : by_rank_) {
    if (value != Streams::none) return true;
  }
  return false;
}

LaunchOptions& LaunchOptions::arguments(std::vector<std::string> value) {
  arguments_ = std::move(value);
  return *this;
}

LaunchOptions& LaunchOptions::nproc_per_node(int value) {
  nproc_per_node_ = value;
  return *this;
}

LaunchOptions& LaunchOptions::nnodes(detail::NodeCount value) {
  nnodes_ = value;
  return *this;
}

LaunchOptions& LaunchOptions::node_rank(int value) {
  node_rank_ = value;
  return *this;
}

LaunchOptions& LaunchOptions::master_addr(std::string value) {
  master_addr_ = std::move(value);
  return *this;
}

LaunchOptions& LaunchOptions::master_port(int value) {
  master_port_ = value;
  return *this;
}

LaunchOptions& LaunchOptions::rdzv_endpoint(std::string value) {
  rdzv_endpoint_ = std::move(value);
  return *this;
}

LaunchOptions& LaunchOptions::rdzv_id(std::string value) {
  rdzv_id_ = std::move(value);
  return *this;
}

LaunchOptions& LaunchOptions::rdzv_token(std::string value) {
  rdzv_token_ = std::move(value);
  return *this;
}

LaunchOptions& LaunchOptions::local_addr(std::string value) {
  local_addr_ = std::move(value);
  return *this;
}

LaunchOptions& LaunchOptions::max_restarts(int value) {
  max_restarts_ = value;
  return *this;
}

LaunchOptions& LaunchOptions::role(std::string value) {
  role_ = std::move(value);
  return *this;
}

LaunchOptions& LaunchOptions::log_dir(std::filesystem::path value) {
  log_dir_ = std::move(value);
  return *this;
}

LaunchOptions& LaunchOptions::redirects(StreamsByRank value) {
  redirects_ = std::move(value);
  return *this;
}

LaunchOptions& LaunchOptions::tee(StreamsByRank value) {
  tee_ = std::move(value);
  return *this;
}

LaunchOptions& LaunchOptions::grace(Seconds value) {
  grace_ = value;
  return *this;
}

LaunchOptions& LaunchOptions::heartbeat_timeout(Seconds value) {
  heartbeat_timeout_ = value;
  return *this;
}

LaunchOptions& LaunchOptions::join_timeout(Seconds value) {
  join_timeout_ = value;
  return *this;
}

LaunchOptions& LaunchOptions::last_call(Seconds value) {
  last_call_ = value;
  return *this;
}

void LaunchOptions::check() const {
  require(!program_.empty(), "a program to launch", "none");
  require(nproc_per_node_ >= 1 && nproc_per_node_ <= kMaxProcesses,
          fmt::format("nproc-per-node from 1 to {}", kMaxProcesses),
          std::to_string(nproc_per_node_));
  require(1 <= nnodes_.min && nnodes_.min <= nnodes_.max && nnodes_.max <= kMaxNodes,
          fmt::format("nnodes from 1 to {}", kMaxNodes),
          fmt::format("{}:{}", nnodes_.min, nnodes_.max));
  require(
      node_rank_ >= 0 && node_rank_ < nnodes_.max,
      fmt::format("node-rank from 0 to {}, as there are {} nodes", nnodes_.max - 1, nnodes_.max),
      std::to_string(node_rank_));
  require(max_restarts_ >= 0, "max-restarts from 0", std::to_string(max_restarts_));
  const bool meets_by_rank = rdzv_endpoint_.empty() && nnodes_.max > 1;
  // The launchers meet at the next port.
  const int most_port = meets_by_rank ? 65534 : 65535;
  require(master_port_ >= 0 && master_port_ <= most_port,
          fmt::format("master-port from 0 to {}", most_port), std::to_string(master_port_));
  if (rdzv_endpoint_.empty()) {
    require(nnodes_.min == nnodes_.max, "rdzv-endpoint with a range of nodes", "none");
    require(nnodes_.max == 1 || !master_addr_.empty(),
            "rdzv-endpoint or master-addr for several nodes", "neither",
            "give the address of node 0, the same on every node");
  } else {
    const Endpoint endpoint = Endpoint::parse(rdzv_endpoint_);
    require(endpoint.port > 0 || nnodes_.max == 1, "rdzv-endpoint with a port for several nodes",
            fmt::format("'{}'", rdzv_endpoint_));
    require(master_addr_.empty() && node_rank_ == 0, "rdzv-endpoint, or master-addr and node-rank",
            "both", "with an endpoint, nodes are numbered in order of arrival");
  }
  require_master(*this);
  require_name("rdzv-id", rdzv_id_);
  require_token(rdzv_token_);
  require(!redirects_.any() || !log_dir_.empty(), "log-dir with redirects", "none",
          "set the folder of the log files");
  require_duration("grace", grace_, 0);
  require_duration("heartbeat-timeout", heartbeat_timeout_, 0.1);
  require_duration("join-timeout", join_timeout_, 0);
  require_duration("last-call", last_call_, 0);
}

}  // namespace semitone::launch
