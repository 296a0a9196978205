#pragma once

#include "semitone/launch/detail/node_count.h"

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::launch {

/// Standard output, standard error, both or neither.
enum class Streams { none = 0, out = 1, err = 2, both = 3 };

/// Selects the streams of each process of a node.
class StreamsByRank {
 public:
  /// Selects the same streams for all processes.
  StreamsByRank(Streams all = Streams::none) : all_(all) {}

  /// Parses torchrun's syntax: "3" selects both streams of every process (0 none, 1 output, 2
  /// errors); "0:1,1:3" selects by local rank, and none for the others. Error for anything else.
  static StreamsByRank parse(std::string_view text);

  Streams of(int local_rank) const;
  /// Whether any stream of any process is selected.
  bool any() const;

 private:
  Streams all_;
  std::map<int, Streams> by_rank_;
};

/// What to launch, on how many machines, and how. Options that torchrun also has keep torchrun's
/// names.
///
///     const auto options = launch::LaunchOptions("build/train").arguments({"--epochs", "3"})
///                              .nproc_per_node(4).max_restarts(2).log_dir("logs");
class LaunchOptions {
 public:
  using Seconds = std::chrono::duration<double>;

  /// @param program  a path, or a name to look up in PATH
  explicit LaunchOptions(std::filesystem::path program) : program_(std::move(program)) {}

  /// Arguments of the program. "${local_rank}" in them is replaced by the process's LOCAL_RANK.
  LaunchOptions& arguments(std::vector<std::string> value);
  /// Number of processes on this node. It may differ between nodes. Default 1.
  LaunchOptions& nproc_per_node(int value);
  /// Number of nodes. Default 1. A range requires rdzv_endpoint.
  LaunchOptions& nnodes(detail::NodeCount value);

  /// Index of this node. Its processes get the ranks after those of the preceding nodes. Used with
  /// master_addr; with rdzv_endpoint, nodes are numbered in order of arrival. Default 0.
  LaunchOptions& node_rank(int value);
  /// Address of node 0, which becomes MASTER_ADDR. Default for one node: 127.0.0.1. With several
  /// nodes, node 0 listens there (see rdzv_endpoint).
  LaunchOptions& master_addr(std::string value);
  /// MASTER_PORT of all processes. 0: a free port, or 29500 for several nodes with master_addr.
  /// With master_addr the launchers of several nodes use the next port for their own rendezvous.
  LaunchOptions& master_port(int value);
  /// Rendezvous endpoint of the launchers, instead of master_addr and node_rank: "host:port",
  /// "[::1]:port", or a host alone (port 29400). The launcher on that host waits for the others,
  /// becomes node 0, and chooses a new MASTER_PORT for every attempt, unless master_port sets one.
  ///
  /// Node 0's launcher listens only at addresses of this host that belong to its own machine: at
  /// one if the host is a numerical address, at all of them if it is a name. With several nodes, a
  /// name that has only loopback addresses on node 0 is an Error, since other machines could not
  /// reach it. So is one that also has addresses of other machines, unless local_addr is set.
  /// "localhost" and numerical loopback addresses are for launchers that all run on one machine.
  /// "0.0.0.0" stands for all interfaces and requires local_addr.
  LaunchOptions& rdzv_endpoint(std::string value);
  /// Name of the job, TORCHELASTIC_RUN_ID, the same on every node. Launchers with another name are
  /// refused. If it is empty, node 0 generates a name. Node 0 then refuses launchers that specify a
  /// name and, with rdzv_endpoint, launchers of another program or with other arguments.
  LaunchOptions& rdzv_id(std::string value);
  /// A secret, the same on every node: up to 1024 printable ASCII characters, without spaces.
  /// Launchers that do not know it are refused. It is sent unencrypted: it keeps out those who can
  /// connect to node 0, and not those who can read the network's packets. Empty, the default: none.
  LaunchOptions& rdzv_token(std::string value);
  /// MASTER_ADDR of the job, if this node becomes node 0 and the others reach it at another address
  /// than that of rdzv_endpoint or master_addr. Behind NAT, node 0 gets "0.0.0.0" as its endpoint,
  /// and the other nodes get this address as theirs.
  LaunchOptions& local_addr(std::string value);

  /// Number of restarts of all processes after a failure. Node 0's value applies to the job.
  /// Default 0.
  LaunchOptions& max_restarts(int value);
  /// ROLE_NAME. Default "default".
  LaunchOptions& role(std::string value);

  /// Folder for the output of the processes: `DIR/<job>/attempt_<n>/<rank>/stdout.log` and
  /// `stderr.log`. It holds the streams of redirects and tee. If neither is set, it holds all
  /// streams, and they also go to the console.
  LaunchOptions& log_dir(std::filesystem::path value);
  /// Streams that go to the log files only. Requires log_dir. Default none.
  LaunchOptions& redirects(StreamsByRank value);
  /// Streams that are relayed line by line to the same stream of this process, with the prefix
  /// "[rank3]: ", and to the log files if there is a log_dir. Default none: processes inherit this
  /// process's streams.
  LaunchOptions& tee(StreamsByRank value);

  /// Time between SIGTERM and SIGKILL when processes are stopped. Default 10 s.
  LaunchOptions& grace(Seconds value);
  /// How long another node's launcher may be silent before it is treated as lost. Default 30 s.
  LaunchOptions& heartbeat_timeout(Seconds value);
  /// How long to wait for the minimum number of nodes. Default 600 s.
  LaunchOptions& join_timeout(Seconds value);
  /// How long to wait for more nodes once the minimum has arrived, counted from the latest arrival.
  /// Nodes that arrive while the processes run cause a restart after this time, or as soon as the
  /// maximum of nnodes is reached; the processes continue until then. Default 5 s.
  LaunchOptions& last_call(Seconds value);

  const std::filesystem::path& program() const { return program_; }
  const std::vector<std::string>& arguments() const { return arguments_; }
  int nproc_per_node() const { return nproc_per_node_; }
  detail::NodeCount nnodes() const { return nnodes_; }
  int node_rank() const { return node_rank_; }
  const std::string& master_addr() const { return master_addr_; }
  int master_port() const { return master_port_; }
  const std::string& rdzv_endpoint() const { return rdzv_endpoint_; }
  const std::string& rdzv_id() const { return rdzv_id_; }
  const std::string& rdzv_token() const { return rdzv_token_; }
  const std::string& local_addr() const { return local_addr_; }
  int max_restarts() const { return max_restarts_; }
  const std::string& role() const { return role_; }
  const std::filesystem::path& log_dir() const { return log_dir_; }
  const StreamsByRank& redirects() const { return redirects_; }
  const StreamsByRank& tee() const { return tee_; }
  Seconds grace() const { return grace_; }
  Seconds heartbeat_timeout() const { return heartbeat_timeout_; }
  Seconds join_timeout() const { return join_timeout_; }
  Seconds last_call() const { return last_call_; }

  /// Error if a value is invalid or two values contradict each other. Checks the values only, not
  /// the system.
  void check() const;

 private:
  std::filesystem::path program_;
  std::vector<std::string> arguments_;
  int nproc_per_node_ = 1;
  detail::NodeCount nnodes_;
  int node_rank_ = 0;
  std::string master_addr_;
  int master_port_ = 0;
  std::string rdzv_endpoint_;
  std::string rdzv_id_;
  std::string rdzv_token_;
  std::string local_addr_;
  int max_restarts_ = 0;
  std::string role_ = "default";
  std::filesystem::path log_dir_;
  StreamsByRank redirects_;
  StreamsByRank tee_;
  Seconds grace_{10};
  Seconds heartbeat_timeout_{30};
  Seconds join_timeout_{600};
  Seconds last_call_{5};
};

}  // namespace semitone::launch
