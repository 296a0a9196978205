#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace semitone::comm {

/// What a group verifies before a collective: that all ranks call the same one with the same
/// shapes, dtypes and root. On a mismatch, CommError on every rank lists the call of each. Without
/// the check, ranks that disagree block until the timeout, or crash: Gloo terminates a process that
/// receives more data than it expects.
enum class CheckLevel {
  none,   ///< nothing
  calls,  ///< collectives that the program itself calls on a Group, except those whose names end in
          ///< _async, since comparing means waiting for the other ranks. Each check costs one small
          ///< exchange, 0.1 ms between processes of a machine; with nccl it also waits for the GPU
  full,   ///< all collectives, including those of DistributedDataParallel: for debugging
};

/// Options of init, with chained setters. Durations above 24 days, such as milliseconds::max() for
/// "never", become 24 days, which the getters then return.
class InitOptions {
 public:
  /// "gloo" (for tensors on the CPU), "nccl" (for CUDA tensors) or "auto". "auto" is nccl if the
  /// build has NCCL and there is a GPU for this process, otherwise gloo. A model on the CPU of a
  /// machine with GPUs needs gloo. Default "auto". init throws Error if the build does not have the
  /// backend, and CommError unless all ranks have the same one: "auto" can differ between machines.
  InitOptions& backend(std::string value);
  /// Timeout of a collective, and of the rendezvous at the start. Default 30 minutes for every
  /// backend (torch: 30 minutes for gloo, 10 for nccl).
  InitOptions& timeout(std::chrono::milliseconds value);
  /// Network interface for connections between ranks ("eth0"). Default: GLOO_SOCKET_IFNAME, else
  /// the loopback interface if all ranks share it, else the one that leads to the master's address.
  /// Listening sockets are bound to this interface's address only, except NCCL's own, which follow
  /// NCCL_SOCKET_IFNAME.
  InitOptions& interface(std::string value);
  /// The local address that rank 0's store listens on, if it is not the master's address: "0.0.0.0"
  /// for all interfaces. Default: the master's address. The default is all interfaces if that
  /// address does not belong to this machine (a Kubernetes service, a forwarded port), or if it is
  /// a loopback address and the environment does not say that all ranks are on this machine.
  InitOptions& bind_address(std::string value);
  /// Overrides the rank and world size of the URL or the environment.
  InitOptions& rank(int value);
  InitOptions& world_size(int value);
  /// Which collectives are verified. init throws CommError unless all ranks have the same level.
  /// Default: the environment variable SEMITONE_COMM_CHECK, else CheckLevel::calls.
  InitOptions& check(CheckLevel value);
  /// Interval between two heartbeats of a rank. Default 1 second.
  InitOptions& heartbeat(std::chrono::milliseconds value);
  /// How long a rank may be silent, because it is stopped or its machine is unreachable, before all
  /// other ranks raise a CommError that names it. A rank that ends is noticed at once. Increase it
  /// for ranks that a debugger stops. At least three heartbeats. Default 30 seconds.
  InitOptions& heartbeat_timeout(std::chrono::milliseconds value);

  const std::string& backend() const { return backend_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  const std::string& interface() const { return interface_; }
  const std::string& bind_address() const { return bind_address_; }
  std::optional<int> rank() const { return rank_; }
  std::optional<int> world_size() const { return world_size_; }
  std::optional<CheckLevel> check() const { return check_; }
  std::chrono::milliseconds heartbeat() const { return heartbeat_; }
  std::chrono::milliseconds heartbeat_timeout() const { return heartbeat_timeout_; }

 private:
  std::string backend_ = "auto";
  std::chrono::milliseconds timeout_ = std::chrono::minutes(30);
  std::string interface_;
  std::string bind_address_;
  std::optional<int> rank_;
  std::optional<int> world_size_;
  std::optional<CheckLevel> check_;
  std::chrono::milliseconds heartbeat_ = std::chrono::seconds(1);
  std::chrono::milliseconds heartbeat_timeout_ = std::chrono::seconds(30);
};

}  // namespace semitone::comm
