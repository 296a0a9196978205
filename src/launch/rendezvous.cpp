#include "src/launch/rendezvous.h"

#include "semitone/core/error.h"
#include "src/core/host_name.h"
#include "src/core/log.h"
#include "src/launch/log_files.h"
#include "src/launch/ports.h"
#include "src/net/lookups.h"
#include "src/net/polling.h"
#include "src/net/sockets.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace semitone::launch {
namespace {

constexpr auto kRendezvous = "launch.rendezvous";
constexpr int kDefaultMasterPort = 29500;
constexpr auto kConnectTimeout = std::chrono::seconds(1);
constexpr auto kRetryInterval = std::chrono::milliseconds(250);

Clock::duration duration(LaunchOptions::Seconds seconds) {
  return std::chrono::duration_cast<Clock::duration>(seconds);
}

// "20261231-235959-1a2b": the start time, and a random part that distinguishes simultaneous jobs.
std::string generate_id() {
  std::random_device random;
  return fmt::format("{:%Y%m%d-%H%M%S}-{:04x}", fmt::localtime(std::time(nullptr)),
                     random() & 0xffffU);
}

template <typename Value>
[[noreturn]] void throw_cannot_listen(const Endpoint& endpoint, const net::Result<Value>& opened) {
  throw Error(kRendezvous, fmt::format("to listen at {}", endpoint.to_string()), opened.problem,
              opened.error == EADDRINUSE ? "another job uses the port: choose another"
              : opened.error == EADDRNOTAVAIL
                  ? "node 0 must run on the machine with this address; behind NAT, give semitone "
                    "launch on node 0 the address 0.0.0.0, and this one as local-addr"
                  : "");
}

std::vector<std::string> addresses_of(const std::vector<Descriptor>& listeners) {
  std::vector<std::string> addresses;
  addresses.reserve(listeners.size());
  for (const Descriptor& listener : listeners) addresses.push_back(net::address_of(listener).host);
  return addresses;
}

bool are_loopback(const std::vector<std::string>& addresses) {
  return std::all_of(addresses.begin(), addresses.end(), net::is_loopback);
}

void require_free(int port) {
  const auto listener = net::listen_on({"0.0.0.0", port});
  if (listener.ok()) return;
  throw Error(kRendezvous, fmt::format("master-port {} to be free", port), listener.problem,
              "choose another port, or 0 for a free one");
}

}  // namespace

Rendezvous::Rendezvous(const LaunchOptions& options)
    : options_(options), deadline_(Clock::now() + duration(options.join_timeout())) {
  if (options.nnodes().max == 1) {
    start_single_node();
  } else if (options.rdzv_endpoint().empty()) {
    start_static();
  } else {
    start_at_endpoint();
  }
}

void Rendezvous::start_single_node() {
  Job alone = job();
  alone.master_addr = options_.master_addr().empty() ? "127.0.0.1" : options_.master_addr();
  if (!options_.rdzv_endpoint().empty()) {
    alone.master_addr = Endpoint::parse(options_.rdzv_endpoint()).host;
    const Endpoint any_port{alone.master_addr, 0};
    if (const auto opened = listen_at(any_port); !opened.ok())
      throw_cannot_listen(any_port, opened);
  }
  if (options_.master_port() > 0) require_free(options_.master_port());
  host(std::move(alone), {});
}

void Rendezvous::start_static() {
  const int port = options_.master_port() > 0 ? options_.master_port() : kDefaultMasterPort;
  endpoint_ = {options_.master_addr(), port + 1};
  if (options_.node_rank() > 0) return;
  require_free(port);
  open_channel();
}

void Rendezvous::start_at_endpoint() {
  endpoint_ = Endpoint::parse(options_.rdzv_endpoint());
  const auto opened = host_at_endpoint();
  // The address is another machine's, another launcher of this machine uses it, or its name is not
  // known yet: connect() goes on.
  const bool is_over = opened.ok() || opened.lookup_error != 0 || opened.error == EADDRINUSE ||
                       opened.error == EADDRNOTAVAIL;
  if (!is_over) throw_cannot_listen(endpoint_, opened);
}

net::Result<Descriptor> Rendezvous::host_at_endpoint() {
  auto opened = listen_at(endpoint_);
  if (!opened.ok()) return net::failure_of<Descriptor>(opened);
  require_reachable(opened.value);
  require_one_machine(opened.value);
  Job open = job();
  open.numbered = is_numbered();
  open.master_addr = endpoint_.host;
  if (open.numbered) open.master_port = endpoint_.port - 1;
  host(std::move(open), std::move(opened.value));
  return {};
}

// A loopback address, or localhost, means that all launchers run on this machine. A machine's name
// does not: Debian gives a machine's own name the address 127.0.1.1 in /etc/hosts, at which the
// other nodes could not reach node 0.
void Rendezvous::require_reachable(const std::vector<Descriptor>& listeners) const {
  const auto addresses = addresses_of(listeners);
  const bool is_meant = endpoint_.host == "localhost" || net::is_numerical(endpoint_.host);
  if (is_meant || !are_loopback(addresses)) return;
  const auto other = net::address_of_default_route();
  throw Error(
      kRendezvous,
      fmt::format("'{}' to be the name of an address that other nodes can reach", endpoint_.host),
      fmt::format("{} on node 0", fmt::join(addresses, " and ")),
      fmt::format("give all nodes {} as {} instead of the name, or correct /etc/hosts on node 0; "
                  "if all launchers run on this machine, give localhost",
                  other.value_or("an address of node 0"),
                  is_numbered() ? "master-addr" : "the host of rdzv-endpoint"));
}

// A name of several machines, such as that of a Kubernetes service without an address of its own,
// would make each of them node 0 of another job.
void Rendezvous::require_one_machine(const std::vector<Descriptor>& listeners) const {
  if (is_numbered() || !options_.local_addr().empty()) return;
  const auto others = net::addresses_elsewhere({endpoint_.host, endpoint_.port});
  if (others.empty()) return;
  throw Error(kRendezvous, fmt::format("'{}' to be the name of one machine", endpoint_.host),
              fmt::format("{} of this machine, and {} of others",
                          fmt::join(addresses_of(listeners), " and "), fmt::join(others, " and ")),
              "give all nodes an address or a name of the machine that is to be node 0; if all are "
              "this machine's, behind NAT for example, pass --local-addr too");
}

void Rendezvous::host(Job job, std::vector<Descriptor> listeners) {
  if (!options_.local_addr().empty()) job.master_addr = options_.local_addr();
  const auto addresses = addresses_of(listeners);
  listening_at_ = fmt::format("{}{}", fmt::join(addresses, ", "),
                              are_loopback(addresses) ? ", which other machines cannot reach" : "");
  coordinator_.emplace(std::move(job), std::move(listeners),
                       duration(options_.heartbeat_timeout()));
  channel_.emplace(coordinator_->connect());
}

bool Rendezvous::is_numbered() const {
  return options_.rdzv_endpoint().empty() && options_.nnodes().max > 1;
}

Job Rendezvous::job() const {
  Job result;
  result.named = !options_.rdzv_id().empty();
  result.run_id = result.named ? options_.rdzv_id() : generate_id();
  result.token = options_.rdzv_token();
  result.program = program();
  result.command = command_digest();
  result.nodes = options_.nnodes();
  result.max_restarts = options_.max_restarts();
  result.master_port = options_.master_port();
  result.join_timeout = duration(options_.join_timeout());
  result.last_call = duration(options_.last_call());
  return result;
}

// The folder may differ between nodes.
std::string Rendezvous::program() const {
  return options_.program().filename().string();
}

std::string Rendezvous::command_digest() const {
  std::vector<std::string> words{program()};
  words.insert(words.end(), options_.arguments().begin(), options_.arguments().end());
  return digest_of(words);
}

Join Rendezvous::request() const {
  Join join;
  join.token = options_.rdzv_token();
  join.run_id = options_.rdzv_id();
  join.min_nodes = options_.nnodes().min;
  join.max_nodes = options_.nnodes().max;
  join.node_rank = is_numbered() ? options_.node_rank() : -1;
  join.processes = options_.nproc_per_node();
  join.program = program();
  join.command = command_digest();
  join.host = host_name();
  return join;
}

// Connects to node 0, or becomes it.
net::Result<Descriptor> Rendezvous::open_channel() {
  if (is_numbered() && options_.node_rank() == 0 && !coordinator_.has_value()) {
    auto opened = host_at_endpoint();
    if (!opened.ok() && opened.lookup_error == 0) throw_cannot_listen(endpoint_, opened);
    return opened;
  }
  auto opened = net::connect_to({endpoint_.host, endpoint_.port}, kConnectTimeout);
  if (opened.ok()) {
    channel_.emplace(std::exchange(opened.value, Descriptor()),
                     duration(options_.heartbeat_timeout()));
  } else if (!is_numbered() && !coordinator_.has_value() && opened.error == ECONNREFUSED &&
             host_at_endpoint().ok()) {
    // The port's user was no launcher; the name was not known yet, or was that of an earlier pod;
    // or two launchers of this machine began to listen in the same moment, and the system refused
    // both.
    log()->info("this is node 0, listening at {}, since nobody answers at {}", listening_at_,
                endpoint_.to_string());
    return {};
  }
  return opened;
}

// Opens the channel to node 0, and asks to join. False if interrupted.
bool Rendezvous::connect(const Interrupt& interrupt) {
  const auto left = std::max(deadline_ - Clock::now(), Clock::duration::zero());
  net::LookupRetries lookups({.any = std::chrono::ceil<std::chrono::milliseconds>(left)});
  while (interrupt.signal() == 0) {
    // While node 0 is not there, a proxy or a cluster's service may accept the connection and close
    // it: that is not an answer.
    const auto opened = open_channel();
    if (opened.ok()) {
      channel_->send(request());
      return true;
    }
    if (opened.lookup_error == 0) {
      lookups.resolved();
      check_deadline(opened.problem);
      wait_until(Clock::now() + kRetryInterval, interrupt);
    } else if (const auto next = lookups.next(opened.lookup_error, opened.problem)) {
      wait_until(*next, interrupt);
    } else {
      throw Error(kRendezvous, "the name of a machine to meet at",
                  fmt::format("{}, for {:.3g} s", opened.problem,
                              std::chrono::duration<double>(lookups.limit()).count()),
                  is_numbered() ? "check master-addr" : "check rdzv-endpoint");
    }
  }
  return false;
}

// Error if no time is left to find node 0.
void Rendezvous::check_deadline(const std::string& problem) const {
  if (Clock::now() < deadline_) return;
  throw Error(kRendezvous,
              fmt::format("node 0's launcher to answer at {} within {:.3g} s",
                          endpoint_.to_string(), options_.join_timeout().count()),
              problem, "was it started? Is its job over? Is the address right, and the port open?");
}

void Rendezvous::wait_until(Time time, const Interrupt& interrupt) const {
  std::vector<pollfd> events{{interrupt.descriptor(), POLLIN, 0}};
  net::poll_until(events, std::min(deadline_, time));
  interrupt.acknowledge();
}

std::variant<Assignment, Outcome> Rendezvous::join(const Interrupt& interrupt) {
  if (options_.nnodes().max > 1 && !answered_) {
    log()->info("{} nodes meet at {}{}{}", options_.nnodes().max, endpoint_.to_string(),
                coordinator_.has_value() ? ", this is node 0, listening at " : "", listening_at_);
  }
  if (channel_.has_value()) channel_->send(request());
  while (interrupt.signal() == 0) {
    if (!channel_.has_value() && !connect(interrupt)) break;
    std::vector<pollfd> events{{interrupt.descriptor(), POLLIN, 0},
                               {channel_->descriptor(), channel_->events(), 0}};
    // The last attempt may have ended with the connection.
    net::poll_until(events, channel_->is_open() ? channel_->deadline() : Clock::now());
    interrupt.acknowledge();
    channel_->update(Clock::now());
    if (auto answer = receive_answer()) return *std::move(answer);
    if (channel_->is_open()) continue;
    if (answered_) {
      return Outcome{Outcome::Kind::lost, std::nullopt, "node 0 is lost: " + channel_->problem()};
    }
    if (channel_->state() != Channel::State::closed) {
      throw Error(kRendezvous, fmt::format("node 0's launcher at {}", endpoint_.to_string()),
                  channel_->problem(), "does the port belong to another program?");
    }
    // Node 0 may not have started yet, or may be restarting.
    check_deadline(channel_->problem());
    channel_.reset();
    wait_until(Clock::now() + kRetryInterval, interrupt);
  }
  if (channel_.has_value()) channel_->send(Leave{"it was " + interrupt.reason()});
  return Outcome{Outcome::Kind::lost, std::nullopt, interrupt.reason()};
}

// Node 0's reply to the join.
std::optional<std::variant<Assignment, Outcome>> Rendezvous::receive_answer() {
  while (const auto message = channel_->receive()) {
    if (const auto* const assignment = std::get_if<Assignment>(&*message)) {
      answered_ = true;
      check_assignment(*assignment);
      return *assignment;
    }
    if (const auto* const stand_by = std::get_if<StandBy>(&*message)) {
      answered_ = true;
      log()->info("this node waits until there is room for it: {}", stand_by->reason);
    }
    const auto* const outcome = std::get_if<Outcome>(&*message);
    if (outcome == nullptr) continue;
    if (outcome->kind != Outcome::Kind::refused) return *outcome;
    throw Error(kRendezvous, fmt::format("to join the job at {}", endpoint_.to_string()),
                "refused: " + outcome->reason);
  }
  return std::nullopt;
}

// It names folders and configures processes, so it is checked: the sender may not be a launcher of
// this job.
void Rendezvous::check_assignment(const Assignment& given) const {
  const auto require = [&](bool right, const std::string& expected, const std::string& got) {
    if (right) return;
    throw Error(kRendezvous,
                fmt::format("{} from node 0's launcher at {}", expected, endpoint_.to_string()),
                got, "is it a launcher of this job?");
  };
  require(names_a_folder(given.run_id), "a job's name that can be a folder's",
          fmt::format("'{}'", given.run_id));
  require(options_.rdzv_id().empty() || given.run_id == options_.rdzv_id(),
          fmt::format("the rdzv-id '{}'", options_.rdzv_id()), fmt::format("'{}'", given.run_id));
  require(0 <= given.node && given.node < given.nodes, "a number of this node",
          fmt::format("{} of {}", given.node, given.nodes));
  require(given.attempt >= 0 && given.first_rank >= 0 &&
              given.world_size >= options_.nproc_per_node() &&
              given.first_rank <= given.world_size - options_.nproc_per_node(),
          "ranks for this node's processes",
          fmt::format("{} of {}", given.first_rank, given.world_size));
  require(0 < given.master_port && given.master_port <= 65535, "a port",
          std::to_string(given.master_port));
}

}  // namespace semitone::launch
