#include "apps/semitone/machine_speed.h"

#include "semitone/core/error.h"
#include "src/core/descriptor.h"
#include "src/core/thread_count.h"
#include "src/net/polling.h"
#include "src/net/sockets.h"

#include <torch/types.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

namespace semitone::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_of(const std::function<void()>& call) {
  const auto begin = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double least_seconds(int calls, const std::function<void()>& call) {
  call();
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < calls; ++i) least = std::min(least, seconds_of(call));
  return least;
}

double product_ms() {
  const at::Tensor left = torch::randn({train::kProductSize, train::kProductSize});
  const at::Tensor right = torch::randn_like(left);
  at::Tensor result = torch::empty_like(left);
  return 1e3 * least_seconds(7, [&] { at::mm_out(result, left, right); });
}

double copy_gb_per_s() {
  const at::Tensor from = torch::zeros({32 << 20}, torch::kFloat);
  const at::Tensor to = torch::empty_like(from);
  const double bytes = 2.0 * static_cast<double>(from.nbytes());
  return 1e-9 * bytes / least_seconds(7, [&] { to.copy_(from); });
}

// The ends of a TCP connection, which block.
struct Loopback {
  Descriptor one;
  Descriptor other;
};

[[noreturn]] void throw_no_loopback(const std::string& problem) {
  throw Error("cli.doctor", "a connection on 127.0.0.1", problem,
              "ranks of one machine need it: is the interface lo up?");
}

void make_ready(const Descriptor& socket) {
  ::fcntl(socket.number(), F_SETFL, ::fcntl(socket.number(), F_GETFL) & ~O_NONBLOCK);
  const int yes = 1;
  ::setsockopt(socket.number(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

Loopback connect() {
  const auto listener = net::listen_on({"127.0.0.1", 0});
  if (!listener.ok()) throw_no_loopback(listener.problem);
  auto connected = net::connect_to(net::address_of(listener.value), std::chrono::seconds(5));
  if (!connected.ok()) throw_no_loopback(connected.problem);
  std::vector<pollfd> events{{listener.value.number(), POLLIN, 0}};
  net::poll_until(events, net::Clock::now() + std::chrono::seconds(5));
  Descriptor accepted = net::accept_from(listener.value);
  if (!accepted.is_open()) throw_no_loopback("no connection to accept");
  make_ready(connected.value);
  make_ready(accepted);
  return {std::move(connected.value), std::move(accepted)};
}

// False if the other end has gone.
bool receive(const Descriptor& socket, std::vector<char>& bytes) {
  for (std::size_t there = 0; there < bytes.size();) {
    const ssize_t got = ::recv(socket.number(), bytes.data() + there, bytes.size() - there, 0);
    if (got <= 0) return false;
    there += static_cast<std::size_t>(got);
  }
  return true;
}

// False if the other end has gone.
bool send(const Descriptor& socket, const std::vector<char>& bytes) {
  for (std::size_t sent = 0; sent < bytes.size();) {
    const ssize_t count =
        ::send(socket.number(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (count <= 0) return false;
    sent += static_cast<std::size_t>(count);
  }
  return true;
}

double round_trip_us() {
  constexpr int kTrips = 2000;
  const Loopback ends = connect();
  std::thread echo([&] {
    std::vector<char> word(8);
    while (receive(ends.other, word) && send(ends.other, word)) {
    }
    ::shutdown(ends.other.number(), SHUT_RDWR);
  });
  std::vector<char> word(8);
  bool is_whole = true;
  const double seconds = seconds_of([&] {
    for (int i = 0; i < kTrips && is_whole; ++i)
      is_whole = send(ends.one, word) && receive(ends.one, word);
  });
  ::shutdown(ends.one.number(), SHUT_RDWR);
  echo.join();
  if (!is_whole) throw_no_loopback("one that breaks");
  return 1e6 * seconds / kTrips;
}

double loopback_gb_per_s() {
  constexpr int kPieces = 128;
  const std::vector<char> piece(4 << 20);
  const Loopback ends = connect();
  std::thread reader([&] {
    std::vector<char> bytes(piece.size());
    bool is_whole = true;
    for (int i = 0; i < kPieces && is_whole; ++i) is_whole = receive(ends.other, bytes);
    if (is_whole) send(ends.other, {1});
    ::shutdown(ends.other.number(), SHUT_RDWR);
  });
  std::vector<char> done(1);
  bool is_whole = true;
  const double seconds = seconds_of([&] {
    for (int i = 0; i < kPieces && is_whole; ++i) is_whole = send(ends.one, piece);
    is_whole = is_whole && receive(ends.one, done);
  });
  reader.join();
  if (!is_whole) throw_no_loopback("one that breaks");
  return 1e-9 * kPieces * static_cast<double>(piece.size()) / seconds;
}

}  // namespace

train::MachineSpeed measure_machine() {
  const at::NoGradGuard no_grad;
  train::MachineSpeed speed;
  speed.product_ms = product_ms();
  speed.copy_gb_per_s = copy_gb_per_s();
  {
    const ThreadCount one(1);
    speed.product_ms_one = product_ms();
    speed.copy_gb_per_s_one = copy_gb_per_s();
  }
  speed.round_trip_us = round_trip_us();
  speed.loopback_gb_per_s = loopback_gb_per_s();
  return speed;
}

}  // namespace semitone::cli
