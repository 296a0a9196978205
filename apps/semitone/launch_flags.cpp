#include "apps/semitone/launch_flags.h"

#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/help.h"
#include "src/launch/endpoint.h"
#include "src/launch/process_count.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

namespace semitone::cli {
namespace {

constexpr auto kLaunchComponent = "cli.launch";

constexpr auto kLaunchFooter =
    R"(PROGRAM is any program that reads torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT …); ${local_rank} in its arguments is replaced by the local rank. Its other arguments are passed on
unchanged. If one process fails, all processes on every node are stopped, and the first failure is shown; with
--max-restarts all are restarted. Ctrl-C stops all processes, a second Ctrl-C kills them. SIGUSR1 and SIGUSR2 are
forwarded to them.

Examples:
  semitone launch --nproc-per-node 4 build/train --epochs 3
  semitone launch --nproc-per-node auto --tee 3 --log-dir logs build/train
  semitone launch --nnodes 2 --node-rank 0 --master-addr node0 --nproc-per-node 8 build/train   and 1 on the other
  semitone launch --nnodes 1:4 --rdzv-endpoint node0:29400 --max-restarts 3 build/train   the same on every node

Exit codes: 0 every process returned 0; otherwise that of the first failed process, or 128 + N if signal N ended it;
128 + N if signal N stopped the launcher, and 137 if that was SIGTERM or SIGHUP and a process had to be killed after the
grace period; 1 if the job could not start or a node was lost; 2 wrong usage.
)";

// Omits the spellings for users of torchrun, and shows the position of the program.
class LaunchHelp : public Help {
 public:
  std::string make_usage(const CLI::App*, std::string name) const override {
    return wrapped("Usage: " + name + " [OPTIONS] PROGRAM [ARGUMENTS...]", columns(), 2) + "\n";
  }

  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    if (positional) return Help::make_option_name(option, positional);
    std::string names;
    for (const std::string& name : option->get_snames()) names += "-" + name + ",";
    for (const std::string& name : option->get_lnames()) {
      if (name.find('_') == std::string::npos) names += "--" + name + ",";
    }
    names.pop_back();
    return names;
  }
};

void require(bool right, std::string_view expected, std::string_view got) {
  if (!right) throw UsageError(kLaunchComponent, expected, got);
}

std::vector<std::string> program_of(const LaunchFlags& flags, const CLI::App& command) {
  const std::vector<std::string> words = command.remaining();
  if (words.empty()) {
    // In other commands --json needs no file.
    throw UsageError(
        kLaunchComponent, "a program to launch", "none",
        flags.json.empty()
            ? "see semitone launch --help"
            : fmt::format("--json takes the next word, '{}', for its file: --json - is standard "
                          "output",
                          flags.json));
  }
  if (words.front().starts_with('-')) {
    throw UsageError(kLaunchComponent, "flags of this command", "'" + words.front() + "'",
                     remedy_for_flag(command, words.front()));
  }
  return words;
}

// torchrun's "static" uses the endpoint as the address of node 0.
bool is_static(const LaunchFlags& flags, const CLI::App& command) {
  if (flags.rdzv_backend.empty()) return command.count("--node-rank") > 0;
  return flags.rdzv_backend == "static";
}

void set_rendezvous(launch::LaunchOptions& options, const LaunchFlags& flags,
                    const CLI::App& command) {
  options.master_addr(flags.master_addr).master_port(static_cast<int>(flags.master_port));
  if (flags.rdzv_endpoint.empty()) {
    require(flags.rdzv_backend != "c10d", "--rdzv-endpoint with --rdzv-backend c10d", "none");
    set_master(options, flags.master_addr, flags.master_port, kLaunchComponent);
    options.node_rank(static_cast<int>(flags.node_rank));
  } else if (!is_static(flags, command)) {
    options.rdzv_endpoint(flags.rdzv_endpoint);
  } else {
    require(flags.master_addr.empty(), "--master-addr or --rdzv-endpoint", "both");
    const auto [host, port] = launch::Endpoint::parse(flags.rdzv_endpoint);
    options.master_addr(host).node_rank(static_cast<int>(flags.node_rank));
    if (flags.master_port == 0) options.master_port(port);
  }
}

void add_node_flags(Flags& add, LaunchFlags& flags) {
  add.text("--nproc-per-node", flags.nproc_per_node, "N|auto|cpu|gpu",
           "Processes on this node; gpu: one per GPU, cpu: one per core, auto: gpu if there is "
           "one, else cpu");
  add.text("--nnodes", flags.nnodes, "N|MIN:MAX", "Number of nodes");
  add.integer("--node-rank", flags.node_rank, 0, 1 << 16, "Index of this node");
  add.text("--master-addr", flags.master_addr, "ADDR",
           "Address of node 0; default: $MASTER_ADDR for several nodes, this machine for one");
  add.integer("--master-port", flags.master_port, 0, 65535,
              "Port of rank 0; 0: a free one for one node and with --rdzv-endpoint, else "
              "$MASTER_PORT or 29500. The launchers of numbered nodes use the next port for their "
              "rendezvous");
  add.text("--rdzv-endpoint", flags.rdzv_endpoint, "HOST[:PORT]",
           "Rendezvous endpoint, for nodes that are numbered in order of arrival; the launcher on "
           "that host is node 0. Default port: 29400");
  add.text("--rdzv-id", flags.rdzv_id, "ID",
           "Name of the job, the same on every node; launchers without it are refused. Default: "
           "generated");
  add.text("--rdzv-token-file", flags.rdzv_token_file, "FILE",
           "File with a secret; launchers that do not have the same are refused. Default: "
           "$SEMITONE_RDZV_TOKEN, or none");
  add.choice("--rdzv-backend", flags.rdzv_backend, {"static", "c10d"},
             "As in torchrun: c10d numbers nodes in order of arrival, static by --node-rank. "
             "Default: static if --node-rank is given");
  add.mark("--standalone", flags.standalone,
           "One node, independent of other jobs on this machine; this is the default");
  add.text("--local-addr", flags.local_addr, "ADDR",
           "MASTER_ADDR if this is node 0 and its address differs from the endpoint's");
}

void add_process_flags(Flags& add, LaunchFlags& flags) {
  add.integer("--max-restarts", flags.max_restarts, 0, 1'000'000,
              "Number of restarts of all processes after a failure");
  add.text("--role", flags.role, "NAME", "ROLE_NAME of the processes");
  add.text("--log-dir", flags.log_dir, "DIR",
           "Write the processes' output to DIR/<id>/attempt_<n>/<rank>/{stdout,stderr}.log; it "
           "implies --tee 3 without --tee and --redirects");
  add.text("-r,--redirects", flags.redirects, "0|1|2|3|RANK:N,…",
           "Streams that go to files only: 1 output, 2 errors, 3 both; for all, or by local rank");
  add.text("-t,--tee", flags.tee, "0|1|2|3|RANK:N,…",
           "Streams to relay line by line with the prefix [rankN], and to write to files with "
           "--log-dir");
}

void add_time_flags(Flags& add, LaunchFlags& flags) {
  const auto seconds = [](double value) { return std::isfinite(value) && value >= 0; };
  constexpr auto kSeconds = "from 0";
  add.number("--grace", flags.grace, seconds, kSeconds,
             "Seconds from SIGTERM to SIGKILL when processes are stopped");
  add.number("--heartbeat-timeout", flags.heartbeat_timeout, seconds, kSeconds,
             "Seconds of silence after which a node is treated as lost");
  add.number("--join-timeout", flags.join_timeout, seconds, kSeconds,
             "Seconds to wait for the minimum number of nodes");
  add.number("--last-call", flags.last_call, seconds, kSeconds,
             "Seconds to wait for more nodes after the minimum has arrived, counted from the "
             "latest arrival");
  add.number("--monitor-interval", flags.monitor_interval, seconds, kSeconds,
             "Accepted for compatibility with torchrun; no effect");
}

}  // namespace

std::shared_ptr<const LaunchFlags> add_launch_flags(CLI::App& command) {
  const auto flags = std::make_shared<LaunchFlags>();
  Flags add(command, kLaunchComponent);
  add.accept_underscores();
  add_node_flags(add, *flags);
  add_process_flags(add, *flags);
  add_time_flags(add, *flags);
  add.mark("--no-python", flags->no_python, "Accepted for compatibility with torchrun; no effect");
  add.text("--json", flags->json, "FILE|-",
           "Write the outcome as JSON to a file, or to standard output");
  command.prefix_command();
  command.formatter(std::make_shared<LaunchHelp>());
  command.footer(kLaunchFooter);
  return flags;
}

launch::LaunchOptions options_of(const LaunchFlags& flags, const CLI::App& command) {
  std::vector<std::string> words = program_of(flags, command);
  launch::LaunchOptions options(words.front());
  words.erase(words.begin());
  const launch::detail::NodeCount nodes = launch::detail::NodeCount::parse(flags.nnodes);
  require(!flags.standalone || nodes.max == 1, "one node with --standalone", flags.nnodes);
  require(!flags.standalone || flags.rdzv_endpoint.empty(), "--standalone or --rdzv-endpoint",
          "both");
  options.arguments(std::move(words))
      .nproc_per_node(launch::ProcessCount::parse(flags.nproc_per_node).count)
      .nnodes(nodes)
      .rdzv_id(flags.rdzv_id)
      .rdzv_token(rdzv_token(flags.rdzv_token_file, kLaunchComponent))
      .local_addr(flags.local_addr)
      .max_restarts(static_cast<int>(flags.max_restarts))
      .role(flags.role)
      .log_dir(flags.log_dir)
      .redirects(launch::StreamsByRank::parse(flags.redirects))
      .tee(launch::StreamsByRank::parse(flags.tee))
      .grace(launch::LaunchOptions::Seconds(flags.grace))
      .heartbeat_timeout(launch::LaunchOptions::Seconds(flags.heartbeat_timeout))
      .join_timeout(launch::LaunchOptions::Seconds(flags.join_timeout))
      .last_call(launch::LaunchOptions::Seconds(flags.last_call));
  set_rendezvous(options, flags, command);
  options.check();
  return options;
}

std::string reason_for_processes(const LaunchFlags& flags) {
  const auto processes = launch::ProcessCount::parse(flags.nproc_per_node);
  if (processes.reason.empty()) return {};
  return fmt::format("{} processes: {}", processes.count, processes.reason);
}

}  // namespace semitone::cli
