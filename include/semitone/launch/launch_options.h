#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::launch {

/// Standard output, standard error, both or none.
enum class Streams { none = 0, out = 1, err = 2, both = 3 };

/// Streams of each process of a node.
class StreamsByRank {
 public:
  /// The same for all.
  StreamsByRank(Streams all = Streams::none) : all_(all) {}

  /// In torchrun's words: "3" for both streams of every process (0 none, 1 output, 2 errors), or
  /// "0:1,1:3" for some by their local rank, none for the others. Error for anything else.
  static StreamsByRank parse(std::string_view text);

  Streams of(int local_rank) const;
  /// Whether any process has any.
  bool any() const;

 private:
  Streams all_;
  std::map<int, Streams> by_rank_;
};

/// How many machines, "nodes", a job runs on: as many as come, between two bounds.
struct NodeCount {
  int min = 1;
  int max = 1;

  /// "2" or "1:4". Error for anything else.
  static NodeCount parse(std::string_view text);
};

/// A place on the network.
struct Endpoint {
  std::string host;
  int port = 29400;

  /// "host:port", "[::1]:port", or a host alone. Error for anything else.
  static Endpoint parse(std::string_view text);
  std::string to_string() const;
};

/// What to launch, on how many machines, and how. The names are torchrun's.
///
///     const auto options = launch::LaunchOptions("build/train").arguments({"--epochs", "3"})
///                              .nproc_per_node(4).max_restarts(2).log_dir("logs");
class LaunchOptions {
 public:
  using Seconds = std::chrono::duration<double>;

  /// @param program  a path, or a name to look up in PATH
  explicit LaunchOptions(std::filesystem::path program) : program_(std::move(program)) {}

  /// What comes after the program's name. "${local_rank}" in them becomes the process's LOCAL_RANK.
  LaunchOptions& arguments(std::vector<std::string> value);
  /// Processes on this node. Nodes may differ. Default 1.
  LaunchOptions& nproc_per_node(int value);
  /// Nodes of the job. Default 1. A range needs rdzv_endpoint.
  LaunchOptions& nnodes(NodeCount value);

  /// Number of this node: its processes get the ranks after those of the nodes before it. For jobs
  /// with a master_addr; with an rdzv_endpoint the nodes are numbered as they come. Default 0.
  LaunchOptions& node_rank(int value);
  /// Address of node 0, MASTER_ADDR of all processes. Default: 127.0.0.1 for one node.
  LaunchOptions& master_addr(std::string value);
  /// MASTER_PORT of all processes. 0: a free port for one node, 29500 for several. The launchers of
  /// several nodes meet at the port after it.
  LaunchOptions& master_port(int value);
  /// Where the launchers of the nodes meet, instead of master_addr and node_rank: "host:port",
  /// "[::1]:port", or a host alone (port 29400). The launcher on that host waits there for the
  /// others, is node 0, and chooses MASTER_PORT anew for every attempt.
  LaunchOptions& rdzv_endpoint(std::string value);
  /// Name of the job, TORCHELASTIC_RUN_ID, the same on every node. Launchers that do not bring it
  /// are refused. Empty: node 0 makes one up, and refuses launchers that have one, or run another
  /// program or the same with other arguments.
  LaunchOptions& rdzv_id(std::string value);
  /// Address under which the other nodes reach node 0, if its endpoint is not: MASTER_ADDR.
  LaunchOptions& local_addr(std::string value);

  /// How often all processes are started again after a failure. Node 0 decides. Default 0.
  LaunchOptions& max_restarts(int value);
  /// ROLE_NAME. Default "default".
  LaunchOptions& role(std::string value);

  /// What the processes write goes to DIR/<job>/attempt_<n>/<rank>/stdout.log and stderr.log: the
  /// streams of redirects and tee, or all, and to the console too, if neither is given.
  LaunchOptions& log_dir(std::filesystem::path value);
  /// Streams that go to their files only. Needs log_dir. Default none.
  LaunchOptions& redirects(StreamsByRank value);
  /// Streams that go line by line to this process's own, each line after "[rank3]: ", and to their
  /// files if there is a log_dir. Default none: processes write to this process's streams directly.
  LaunchOptions& tee(StreamsByRank value);

  /// How long processes may take to end after SIGTERM, before SIGKILL. Default 10 s.
  LaunchOptions& grace(Seconds value);
  /// How long another node's launcher may be silent before it counts as gone. Default 30 s.
  LaunchOptions& heartbeat_timeout(Seconds value);
  /// How long to wait for the (fewest) nodes to meet. Default 600 s.
  LaunchOptions& join_timeout(Seconds value);
  /// How long to wait for more nodes once the fewest are there, since the last one that came; an
  /// attempt goes on meanwhile. Default 5 s.
  LaunchOptions& last_call(Seconds value);

  const std::filesystem::path& program() const { return program_; }
  const std::vector<std::string>& arguments() const { return arguments_; }
  int nproc_per_node() const { return nproc_per_node_; }
  NodeCount nnodes() const { return nnodes_; }
  int node_rank() const { return node_rank_; }
  const std::string& master_addr() const { return master_addr_; }
  int master_port() const { return master_port_; }
  const std::string& rdzv_endpoint() const { return rdzv_endpoint_; }
  const std::string& rdzv_id() const { return rdzv_id_; }
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

  /// Error if a value makes no sense, or two contradict each other. Looks at nothing outside.
  void check() const;

 private:
  std::filesystem::path program_;
  std::vector<std::string> arguments_;
  int nproc_per_node_ = 1;
  NodeCount nnodes_;
  int node_rank_ = 0;
  std::string master_addr_;
  int master_port_ = 0;
  std::string rdzv_endpoint_;
  std::string rdzv_id_;
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

/// How many processes to run on this node.
struct ProcessCount {
  int count = 1;
  std::string reason;  ///< "one for each of 2 cores"; empty if it was given as a number

  /// In torchrun's words: a number, "gpu" (one for each GPU), "cpu" (one for each core that this
  /// process may use), or "auto" (gpu where there is any, else cpu). Error for anything else, and
  /// for "gpu" where there is none.
  static ProcessCount parse(std::string_view text);
};

}  // namespace semitone::launch
