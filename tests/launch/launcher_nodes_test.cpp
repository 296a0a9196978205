#include "semitone/launch/launcher.h"
#include "src/launch/channel.h"
#include "src/launch/clock.h"
#include "src/launch/coordinator.h"
#include "src/launch/messages.h"
#include "src/launch/ports.h"
#include "src/net/address.h"
#include "src/net/polling.h"
#include "src/net/sockets.h"
#include "tests/launch/launcher_fixture.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/host_names.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

// Jobs on several nodes: launchers in threads of this process, as if on separate machines.
namespace semitone::launch {
namespace {

using test::eventually;
using test::expect_error;
using test::ids_in;
using test::read_text;
using test::read_words;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Seconds = LaunchOptions::Seconds;

class Nodes : public LauncherTest {
 protected:
  // With a short timeout instead of the long default, and an endpoint.
  LaunchOptions node(const std::string& script, detail::NodeCount nodes, int processes = 1) const {
    return shell(script, processes)
        .nnodes(nodes)
        .rdzv_endpoint("127.0.0.1:" + std::to_string(port_))
        .join_timeout(Seconds(60))
        .last_call(Seconds(0.3));
  }

  std::future<LaunchResult> start(const LaunchOptions& options) {
    return start(launchers_.emplace_back(std::make_unique<Launcher>(options)).get());
  }

  // Waits until a launcher is the host: of several that start together, a race decides.
  bool is_hosted() const {
    return eventually(
        [&] { return net::connect_to({"127.0.0.1", port_}, std::chrono::seconds(1)).ok(); });
  }

  int port_ = free_port();
  std::vector<std::unique_ptr<Launcher>> launchers_;

 private:
  static std::future<LaunchResult> start(Launcher* launcher) {
    return std::async(std::launch::async, [launcher] { return launcher->run(); });
  }
};

TEST_F(Nodes, MeetAtAnEndpointAndDivideTheRanks) {
  const std::string script = "env > $DIR/$RANK";
  auto host = start(node(script, {2, 2}, 2));
  auto other = start(node(script, {2, 2}, 3));
  const LaunchResult first = host.get();
  const LaunchResult second = other.get();
  EXPECT_EQ(first.outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(second.outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(first.run_id, second.run_id);
  EXPECT_THAT(first.run_id, Not(IsEmpty()));
  // The host is decided by a race; it has the first ranks.
  std::map<std::string, int> ranks_of_node;
  for (int rank = 0; rank < 5; ++rank) {
    auto environment = environment_of(std::to_string(rank));
    EXPECT_EQ(environment["WORLD_SIZE"], "5");
    EXPECT_EQ(environment["GROUP_WORLD_SIZE"], "2");
    EXPECT_EQ(environment["MASTER_ADDR"], "127.0.0.1");
    EXPECT_EQ(environment["MASTER_PORT"], environment_of("0")["MASTER_PORT"]);
    EXPECT_EQ(environment["TORCHELASTIC_RUN_ID"], first.run_id);
    EXPECT_EQ(environment["LOCAL_RANK"],
              std::to_string(ranks_of_node[environment["GROUP_RANK"]]++));
  }
  for (int rank = 0; rank < 5; ++rank) {
    auto environment = environment_of(std::to_string(rank));
    EXPECT_EQ(environment["LOCAL_WORLD_SIZE"],
              std::to_string(ranks_of_node[environment["GROUP_RANK"]]));
  }
}

TEST_F(Nodes, NumberedNodesMeetAtTheNextPort) {
  const auto numbered = [&](int number) {
    return start(shell("env > $DIR/$RANK", number + 1)
                     .nnodes({2, 2})
                     .master_addr("localhost")
                     .master_port(port_)
                     .node_rank(number));
  };
  // The one that comes first waits for node 0.
  auto second = numbered(1);
  auto first = numbered(0);
  EXPECT_EQ(first.get().exit_code(), 0);
  EXPECT_EQ(second.get().exit_code(), 0);
  EXPECT_EQ(environment_of("0")["GROUP_RANK"], "0");
  EXPECT_EQ(environment_of("0")["LOCAL_WORLD_SIZE"], "1");
  EXPECT_EQ(environment_of("2")["GROUP_RANK"], "1");
  EXPECT_EQ(environment_of("2")["LOCAL_RANK"], "1");
  EXPECT_EQ(environment_of("2")["MASTER_ADDR"], "localhost");
  EXPECT_EQ(environment_of("2")["MASTER_PORT"], std::to_string(port_));
}

TEST_F(Nodes, AFailureOnOneStopsTheOthersAndEachNamesIt) {
  for (const std::string failing : {"0", "3"}) {
    write_text(folder_ / "ids", "");
    const std::string script =
        "echo $$ >> $DIR/ids\n"
        "while [ $(wc -l < $DIR/ids) -lt 4 ]; do sleep 0.01; done\n"
        "[ $RANK = " +
        failing +
        " ] && { echo it broke >&2; exit 9; }\n"
        "exec sleep 1000";
    auto first = start(node(script, {2, 2}, 2).tee(Streams::err));
    auto second = start(node(script, {2, 2}, 2).tee(Streams::err));
    for (const LaunchResult& result : {first.get(), second.get()}) {
      EXPECT_EQ(result.outcome, LaunchOutcome::failed);
      EXPECT_EQ(result.exit_code(), 9);
      ASSERT_TRUE(result.first_failure.has_value());
      EXPECT_EQ(std::to_string(result.first_failure->rank), failing);
      EXPECT_EQ(result.first_failure->node, failing == "0" ? 0 : 1);
      EXPECT_EQ(result.first_failure->last_lines, "it broke");
    }
    expect_all_gone("ids", 4);
  }
}

TEST_F(Nodes, RestartTogether) {
  const std::string script =
      "echo $$ >> $DIR/ids\n"
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0\n"
      "while [ $(wc -l < $DIR/ids) -lt 2 ]; do sleep 0.01; done\n"
      "[ $RANK = 1 ] && exit 1\n"
      "exec sleep 1000";
  // The host's value counts.
  auto first = start(node(script, {2, 2}).max_restarts(1));
  auto second = start(node(script, {2, 2}).max_restarts(1));
  for (const LaunchResult& result : {first.get(), second.get()}) {
    EXPECT_EQ(result.outcome, LaunchOutcome::succeeded);
    EXPECT_EQ(result.restarts, 1);
  }
  expect_all_gone("ids", 4);
}

TEST_F(Nodes, ANodeThatIsDoneWaitsForTheOthers) {
  const std::string script = "[ $RANK = 1 ] && { sleep 0.5; echo late > $DIR/late; }; exit 0";
  auto first = start(node(script, {2, 2}));
  auto second = start(node(script, {2, 2}));
  EXPECT_EQ(first.get().exit_code(), 0);
  EXPECT_EQ(read_text(folder_ / "late"), "late\n");
  EXPECT_EQ(second.get().exit_code(), 0);
}

TEST_F(Nodes, StoppingOneNodeEndsTheJobOfAll) {
  const std::string script = "echo $$ >> $DIR/ids; exec sleep 1000";
  auto first = start(node(script, {2, 2}));
  auto second = start(node(script, {2, 2}));
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids").size() == 2; }));
  launchers_[1]->stop(SIGTERM);
  EXPECT_EQ(second.get().outcome, LaunchOutcome::interrupted);
  const LaunchResult result = first.get();
  EXPECT_EQ(result.outcome, LaunchOutcome::lost);
  EXPECT_EQ(result.exit_code(), 1);
  EXPECT_THAT(result.reason,
              AllOf(HasSubstr("is lost: it was stopped by signal 15"), HasSubstr("node ")));
  expect_all_gone("ids", 2);
}

TEST_F(Nodes, BeginWithFewerThanTheMaximumAfterTheLastCall) {
  const std::string script = "echo $WORLD_SIZE >> $DIR/sizes";
  auto first = start(node(script, {2, 4}));
  auto second = start(node(script, {2, 4}));
  EXPECT_EQ(first.get().exit_code(), 0);
  EXPECT_EQ(second.get().exit_code(), 0);
  EXPECT_THAT(read_words(folder_ / "sizes"), ::testing::ElementsAre("2", "2"));
}

TEST_F(Nodes, RestartWithANodeThatArrivesLater) {
  const std::string script =
      "echo $$ >> $DIR/ids$WORLD_SIZE\n"
      "[ $WORLD_SIZE = 2 ] && exit 0; exec sleep 1000";
  auto first = start(node(script, {1, 2}));
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids1").size() == 1; }));
  auto second = start(node(script, {1, 2}));
  EXPECT_EQ(first.get().exit_code(), 0);
  EXPECT_EQ(second.get().exit_code(), 0);
  expect_all_gone("ids1", 1);
  expect_all_gone("ids2", 2);
}

TEST_F(Nodes, ContinueWithoutAStoppedNode) {
  const std::string script =
      "echo $$ >> $DIR/ids$WORLD_SIZE\n"
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && echo $WORLD_SIZE > $DIR/size && exit 0\n"
      "exec sleep 1000";
  auto host = start(node(script, {1, 2}).max_restarts(1));
  ASSERT_TRUE(is_hosted());
  auto other = start(node(script, {1, 2}).max_restarts(1));
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids2").size() == 2; }));
  launchers_[1]->stop(SIGINT);
  EXPECT_EQ(other.get().outcome, LaunchOutcome::interrupted);
  const LaunchResult result = host.get();
  EXPECT_EQ(result.outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(result.restarts, 1);
  EXPECT_EQ(read_text(folder_ / "size"), "1\n");
  expect_all_gone("ids2", 2);
}

TEST_F(Nodes, TooFewNodesEndTheJobWithAReason) {
  const LaunchResult result = run(node("echo $$ >> $DIR/ids", {2, 2}).join_timeout(Seconds(0.2)));
  EXPECT_EQ(result.outcome, LaunchOutcome::lost);
  EXPECT_EQ(result.reason, "1 of 2 nodes joined within 0.2 s");
  EXPECT_EQ(result.exit_code(), 1);
  EXPECT_THAT(read_words(folder_ / "ids"), IsEmpty());
}

TEST_F(Nodes, AnEndpointThatDoesNotAnswerIsAnError) {
  const auto options = shell("exit 0")
                           .nnodes({2, 2})
                           .node_rank(1)
                           .master_addr("127.0.0.1")
                           .master_port(port_)
                           .join_timeout(Seconds(0.2));
  expect_error([&] { run(options); },
               {"[launch.rendezvous] expected node 0's launcher to answer at 127.0.0.1:",
                "within 0.2 s", "Connection refused", "was it started?"});
}

TEST_F(Nodes, MeetAtTheAddressesOfANameAndNoOthers) {
  const auto routed = net::address_of_default_route();
  if (!routed.has_value()) return;  // a machine without a network
  const test::HostName name("node0", {"127.0.0.2", *routed});
  const auto endpoint = "node0:" + std::to_string(port_);
  const auto connects = [&](const std::string& host) {
    return net::connect_to({host, port_}, std::chrono::seconds(30));
  };
  auto first = start(node("env > $DIR/$RANK", {2, 2}).rdzv_endpoint(endpoint));
  EXPECT_TRUE(eventually([&] { return connects(*routed).ok(); }));
  EXPECT_TRUE(connects("127.0.0.2").ok());
  EXPECT_EQ(connects("127.0.0.1").error, ECONNREFUSED);
  auto second = start(node("env > $DIR/$RANK", {2, 2}).rdzv_endpoint(endpoint));
  EXPECT_EQ(first.get().outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(second.get().outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(environment_of("1")["MASTER_ADDR"], "node0");
}

// Debian gives a machine's own name such an address, and other machines have another one for it.
TEST_F(Nodes, ANameThatOnlyNodeZeroCanReachIsAnError) {
  const test::HostName name("node0", {"127.0.1.1"});
  const auto endpoint = "node0:" + std::to_string(port_);
  const auto by_rank =
      shell("exit 0").nnodes({2, 2}).master_addr("node0").master_port(port_).node_rank(0);
  const std::string problem =
      "[launch.rendezvous] expected 'node0' to be the name of an address that other nodes can "
      "reach, got 127.0.1.1 on node 0";
  expect_error([&] { run(node("exit 0", {1, 2}).rdzv_endpoint(endpoint)); },
               {problem, "as the host of rdzv-endpoint", "/etc/hosts", "localhost"});
  expect_error([&] { run(by_rank); }, {problem, "as master-addr"});
  EXPECT_EQ(run(node("exit 0", {1, 1}).rdzv_endpoint(endpoint)).exit_code(), 0);
}

// Each machine would be node 0 of a job of its own.
TEST_F(Nodes, ANameOfSeveralMachinesIsAnError) {
  const auto routed = net::address_of_default_route();
  if (!routed.has_value()) return;  // a machine without a network
  const test::HostName name("service", {*routed, "198.51.100.1"});
  const auto options = node("exit 0", {1, 2})
                           .rdzv_endpoint("service:" + std::to_string(port_))
                           .last_call(Seconds(0));
  expect_error([&] { run(options); },
               {"[launch.rendezvous] expected 'service' to be the name of one machine",
                *routed + " of this machine, and 198.51.100.1 of others"});
}

TEST_F(Nodes, NodeZeroLogsWhereItListens) {
  const test::CapturedLog log;
  run(node("exit 0", {2, 2}).join_timeout(Seconds(0.2)));
  EXPECT_THAT(log.text(), HasSubstr("this is node 0, listening at 127.0.0.1, which other machines "
                                    "cannot reach"));
}

TEST_F(Nodes, BehindNatNodeZeroListensEverywhereAndNamesItsAddress) {
  const auto port = std::to_string(port_);
  auto host = start(
      node("env > $DIR/$RANK", {2, 2}).rdzv_endpoint("0.0.0.0:" + port).local_addr("127.0.0.1"));
  ASSERT_TRUE(is_hosted());
  auto other = start(node("env > $DIR/$RANK", {2, 2}));
  EXPECT_EQ(host.get().outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(other.get().outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(environment_of("1")["MASTER_ADDR"], "127.0.0.1");
}

TEST_F(Nodes, AnotherProgramAtTheEndpointIsAnError) {
  // It accepts connections and sends nothing.
  const auto other = listen_at({"127.0.0.1", port_});
  ASSERT_TRUE(other.ok()) << other.problem;
  expect_error(
      [&] { run(node("exit 0", {2, 2}).heartbeat_timeout(Seconds(0.2))); },
      {"[launch.rendezvous] expected node 0's launcher at", "no message", "to another program"});
}

// Two launchers that listen in the same moment refuse each other, so that none is node 0 at first.
TEST_F(Nodes, APortThatNobodyListensOnMayBeTakenLater) {
  Descriptor bound(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port_));
  ASSERT_EQ(::bind(bound.number(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
            0);
  auto one = start(node("exit 0", {2, 2}).join_timeout(Seconds(60)));
  auto other = start(node("exit 0", {2, 2}).join_timeout(Seconds(60)));
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  bound = Descriptor();
  EXPECT_EQ(one.get().outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(other.get().outcome, LaunchOutcome::succeeded);
}

TEST_F(Nodes, AProxyThatClosesConnectionsIsNotNodeZero) {
  // As a cluster's proxy does while node 0 is not there.
  const auto proxy = net::listen_on({"127.0.0.1", port_});
  ASSERT_TRUE(proxy.ok()) << proxy.problem;
  std::atomic<bool> over = false;
  auto connections = std::async(std::launch::async, [&] {
    int count = 0;
    while (!over) {
      std::vector<pollfd> events{{proxy.value.number(), POLLIN, 0}};
      net::poll_until(events, Clock::now() + std::chrono::milliseconds(50));
      if (events[0].revents != 0 && net::accept_from(proxy.value).is_open()) ++count;
    }
    return count;
  });
  expect_error(
      [&] { run(node("exit 0", {2, 2}).join_timeout(Seconds(1))); },
      {"[launch.rendezvous] expected node 0's launcher to answer at 127.0.0.1:", "within 1 s"});
  over = true;
  const int count = connections.get();
  EXPECT_GE(count, 1);
  EXPECT_LE(count, 6) << "there is a pause of 250 ms between two attempts";
}

// Answers the first launcher that connects, as node 0 would.
std::future<void> false_host(const net::Result<Descriptor>& listener, Assignment given) {
  return std::async(std::launch::async, [&listener, given = std::move(given)] {
    std::vector<pollfd> events{{listener.value.number(), POLLIN, 0}};
    net::poll_until(events, Clock::now() + std::chrono::minutes(1));
    Channel channel(net::accept_from(listener.value), std::chrono::minutes(1));
    channel.send(given);
    while (channel.is_open()) {
      std::vector<pollfd> more{{channel.descriptor(), channel.events(), 0}};
      net::poll_until(more, channel.deadline());
      channel.update(Clock::now());
    }
  });
}

TEST_F(Nodes, AssignmentsFromTheNetworkAreChecked) {
  Assignment given;
  given.nodes = 2;
  given.world_size = 2;
  given.node = 1;
  given.first_rank = 1;
  given.master_addr = "127.0.0.1";
  given.master_port = 20000;
  const auto expect = [&](const Assignment& assignment, std::string_view part) {
    const auto listener = net::listen_on({"127.0.0.1", port_});
    ASSERT_TRUE(listener.ok()) << listener.problem;
    auto host = false_host(listener, assignment);
    expect_error(
        [&] {
          run(node("echo $$ >> $DIR/ids", {2, 2})
                  .rdzv_id("job")
                  .log_dir(folder_ / "logs")
                  .redirects(Streams::both));
        },
        {"[launch.rendezvous] expected", part, "is it a launcher of this job?"});
    host.get();
  };
  for (const char* name : {"../OUTSIDE", "..", "", "a\nb"}) {
    Assignment bad = given;
    bad.run_id = name;
    expect(bad, "name");
  }
  Assignment bad = given;
  bad.run_id = "another";
  expect(bad, "the rdzv-id 'job'");
  bad.run_id = "job";
  bad.first_rank = 2;
  expect(bad, "ranks for this node's processes");
  EXPECT_THAT(read_words(folder_ / "ids"), IsEmpty());
  EXPECT_FALSE(std::filesystem::exists(folder_ / "OUTSIDE"));
}

// A false node 0, which gives this node the ranks from 1 on, and lets it restart when a process fails.
// Its launcher is killed then, when the node has joined again, or not at all.
class RestartingHost {
 public:
  enum class Ends { at_failure, at_second_join, with_the_node };

  RestartingHost(int port, int processes, Ends ends) : ends_(ends) {
    given_.run_id = "job";
    given_.nodes = 2;
    given_.node = given_.first_rank = 1;
    given_.world_size = 1 + processes;
    given_.master_addr = "127.0.0.1";
    given_.master_port = 20000;
    auto listener = net::listen_on({"127.0.0.1", port});
    EXPECT_TRUE(listener.ok()) << listener.problem;
    listener_ = std::move(listener.value);
    done_ = std::async(std::launch::async, [this] { run(); });
  }

  int joins() const { return joins_; }
  void wait() const { done_.wait(); }

 private:
  bool is_at_end() const {
    return (ends_ == Ends::at_failure && failed_) || (ends_ == Ends::at_second_join && joins_ >= 2);
  }

  void run() {
    std::vector<pollfd> events{{listener_.number(), POLLIN, 0}};
    net::poll_until(events, Clock::now() + std::chrono::minutes(1));
    Channel channel(net::accept_from(listener_), std::chrono::minutes(1));
    while (channel.is_open() && !is_at_end()) {
      std::vector<pollfd> more{{channel.descriptor(), channel.events(), 0}};
      net::poll_until(more, channel.deadline());
      channel.update(Clock::now());
      while (const auto message = channel.receive()) {
        if (std::holds_alternative<Join>(*message) && ++joins_ == 1) channel.send(given_);
        if (!std::holds_alternative<WorkerFailure>(*message)) continue;
        failed_ = true;
        channel.send(Outcome{Outcome::Kind::restart, std::nullopt, "a process failed"});
      }
      channel.update(Clock::now());
    }
  }

  Assignment given_;
  Ends ends_;
  Descriptor listener_;
  std::atomic<int> joins_ = 0;
  bool failed_ = false;
  std::future<void> done_;
};

TEST_F(Nodes, OutputIsCompleteIfNodeZeroIsLostDuringARestart) {
  UnreadConsole console;
  const RestartingHost host(port_, 1, RestartingHost::Ends::at_second_join);
  auto job = start(node("seq 1 5000; exit 1", {2, 2}).tee(Streams::out));
  host.wait();
  // The console is read only after the launcher has noticed the loss.
  job.wait_for(std::chrono::milliseconds(500));
  auto text = console.read();
  job.wait();
  console.restore();
  EXPECT_EQ(host.joins(), 2);
  const LaunchResult result = job.get();
  EXPECT_EQ(result.outcome, LaunchOutcome::lost);
  EXPECT_THAT(result.reason, HasSubstr("node 0 is lost"));
  EXPECT_EQ(text.get(), relayed_numbers(1, 5000));
}

// One process fails, and the other ignores SIGTERM.
constexpr auto kFailsAndStays = "[ $LOCAL_RANK = 0 ] && exit 3; trap '' TERM; sleep 1000";

TEST_F(Nodes, NodeZeroMayBeLostWhileProcessesStop) {
  const RestartingHost host(port_, 2, RestartingHost::Ends::at_failure);
  auto job = start(node(kFailsAndStays, {2, 2}, 2).grace(Seconds(0.5)));
  const bool ended = job.wait_for(std::chrono::seconds(30)) == std::future_status::ready;
  EXPECT_TRUE(ended);
  if (!ended) launchers_[0]->stop(SIGTERM);
  const LaunchResult result = job.get();
  EXPECT_EQ(result.outcome, LaunchOutcome::lost);
  EXPECT_THAT(result.reason, HasSubstr("node 0 is lost"));
}

// The processes of the attempt had ended before the signal.
TEST_F(Nodes, ASignalBetweenTwoAttemptsIsTheExitCode) {
  const RestartingHost host(port_, 2, RestartingHost::Ends::with_the_node);
  auto job = start(node(kFailsAndStays, {2, 2}, 2).grace(Seconds(0.2)));
  ASSERT_TRUE(eventually([&] { return host.joins() == 2; }));
  launchers_[0]->stop(SIGTERM);
  const LaunchResult result = job.get();
  EXPECT_EQ(result.outcome, LaunchOutcome::interrupted);
  EXPECT_EQ(result.exit_code(), 128 + SIGTERM);
  EXPECT_TRUE(result.workers.empty());
}

TEST_F(Nodes, AnExtraNodeReplacesALostNode) {
  const std::string script =
      "echo $$ >> $DIR/ids$TORCHELASTIC_RESTART_COUNT\n"
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; exec sleep 1000";
  auto first = start(node(script, {2, 2}).max_restarts(1));
  ASSERT_TRUE(is_hosted());
  auto second = start(node(script, {2, 2}).max_restarts(1));
  ASSERT_TRUE(eventually([&] { return ids_in(folder_ / "ids0").size() == 2; }));
  auto third = start(node(script, {2, 2}).max_restarts(1));
  // It joins, and the others are not affected.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(ids_in(folder_ / "ids0").size(), 2U);
  launchers_[1]->stop(SIGTERM);
  EXPECT_EQ(second.get().outcome, LaunchOutcome::interrupted);
  EXPECT_EQ(first.get().outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(third.get().outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(ids_in(folder_ / "ids1").size(), 2U);
}

TEST_F(Nodes, MayHaveDifferentHeartbeatTimeouts) {
  auto one = start(node("sleep 6", {2, 2}).heartbeat_timeout(Seconds(4)));
  auto other = start(node("sleep 6", {2, 2}).heartbeat_timeout(Seconds(60)));
  for (const LaunchResult& result : {one.get(), other.get()})
    EXPECT_EQ(result.outcome, LaunchOutcome::succeeded) << result.reason;
}

TEST_F(Nodes, TheNextJobBeginsAlthoughAProcessOfThePreviousHasNotEnded) {
  const std::string script =
      "sh -c \"trap '' TERM; echo ready > $DIR/ready; sleep 1000\" &\n"
      "while [ ! -e $DIR/ready ]; do sleep 0.01; done; exit 3";
  auto previous = start(node(script, {1, 2}).grace(Seconds(100'000)));
  EXPECT_TRUE(eventually([&] { return std::filesystem::exists(folder_ / "ready"); }));
  EXPECT_TRUE(eventually(
      [&] { return !net::connect_to({"127.0.0.1", port_}, std::chrono::seconds(1)).ok(); }));
  auto next = start(node("exit 0", {1, 2}));
  next.wait();
  launchers_[0]->stop(SIGKILL);
  EXPECT_EQ(previous.get().outcome, LaunchOutcome::failed);
  const LaunchResult result = next.get();
  EXPECT_EQ(result.outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(result.workers.size(), 1U);
}

TEST_F(Nodes, NodesOfAnotherProgramAreRefused) {
  auto host = start(node("exit 0", {2, 2}));
  ASSERT_TRUE(is_hosted());
  expect_error([&] { run(node("echo another", {2, 2})); },
               {"refused", "this job runs 'sh', not the same with other arguments", "rdzv-id"});
  launchers_[0]->stop(SIGTERM);
  EXPECT_EQ(host.get().outcome, LaunchOutcome::interrupted);
}

TEST_F(Nodes, NodesOfAnotherJobAreRefused) {
  auto host = start(node("exit 0", {2, 2}).rdzv_id("one"));
  // Until the host listens, the other launcher would become it.
  ASSERT_TRUE(is_hosted());
  expect_error(
      [&] { run(node("exit 0", {2, 2}).rdzv_id("other")); },
      {"expected to join the job at 127.0.0.1:", "refused", "another rdzv-id than 'other'"});
  launchers_[0]->stop(SIGTERM);
  EXPECT_EQ(host.get().outcome, LaunchOutcome::interrupted);
}

TEST_F(Nodes, ATokenKeepsOutNodesThatDoNotKnowIt) {
  auto host = start(node("exit 0", {2, 2}).rdzv_token("secret"));
  ASSERT_TRUE(is_hosted());
  expect_error([&] { run(node("exit 0", {2, 2}).rdzv_token("guess")); },
               {"expected to join the job at 127.0.0.1:", "refused", "another rdzv-token"});
  EXPECT_EQ(run(node("exit 0", {2, 2}).rdzv_token("secret")).outcome, LaunchOutcome::succeeded);
  EXPECT_EQ(host.get().outcome, LaunchOutcome::succeeded);
}

// Adds what the other end has sent. Returns whether it has closed the connection after that.
bool receive_to_end(const Descriptor& socket, std::string& text) {
  std::array<char, 256> bytes{};
  ssize_t got = 0;
  while ((got = ::recv(socket.number(), bytes.data(), bytes.size(), 0)) > 0)
    text.append(bytes.data(), static_cast<std::size_t>(got));
  return got == 0 || errno == ECONNRESET;
}

bool is_closed(const Descriptor& socket) {
  std::string text;
  return receive_to_end(socket, text);
}

// Sends as much as the other end takes before it closes the connection.
void send_all(const Descriptor& socket, std::string_view text) {
  EXPECT_TRUE(eventually([&] {
    ssize_t count = 0;
    while (!text.empty() &&
           (count = ::send(socket.number(), text.data(), text.size(), MSG_NOSIGNAL)) > 0)
      text.remove_prefix(static_cast<std::size_t>(count));
    return text.empty() || errno == ECONNRESET || errno == EPIPE;
  }));
}

// Connections of which node 0 knows nothing yet.
class Strangers : public ::testing::Test {
 protected:
  // Of two nodes.
  static Job job() {
    Job result;
    result.nodes = {2, 2};
    result.master_addr = "127.0.0.1";
    result.join_timeout = std::chrono::minutes(10);
    return result;
  }

  // @param most  see Coordinator
  void start(Clock::duration heartbeat_timeout, std::size_t most, Job job = Strangers::job()) {
    auto listening = net::listen_on_own({"127.0.0.1", 0});
    ASSERT_TRUE(listening.ok()) << listening.problem;
    address_ = net::address_of(listening.value.front());
    coordinator_.emplace(std::move(job), std::move(listening.value), heartbeat_timeout, most);
    host_.emplace(coordinator_->connect());
  }

  Descriptor connect() const {
    auto connected = net::connect_to(address_, std::chrono::seconds(30));
    EXPECT_TRUE(connected.ok()) << connected.problem;
    return std::move(connected.value);
  }

  // Whether node 0, and a node that connects, get their assignments.
  bool begins_with(const Join& join) {
    host_->send(join);
    std::optional<Channel> node;
    return eventually([&] {
      // While node 0 has too many strangers it closes the connection: a launcher tries again.
      if (!node.has_value() || !node->is_open()) {
        node.emplace(connect(), std::chrono::minutes(10));
        node->send(join);
      }
      host_->update(Clock::now());
      node->update(Clock::now());
      const auto message = node->receive();
      return message.has_value() && std::holds_alternative<Assignment>(*message);
    });
  }

  net::Address address_;
  std::optional<Coordinator> coordinator_;
  std::optional<Channel> host_;  // node 0's own
};

TEST_F(Strangers, WhoDoNotJoinAreDisconnected) {
  start(std::chrono::seconds(1), 8);
  const Descriptor stranger = connect();
  // It is not silent.
  EXPECT_TRUE(eventually([&] {
    ::send(stranger.number(), " ", 1, MSG_NOSIGNAL);
    return is_closed(stranger);
  }));
}

TEST_F(Strangers, WhoSendSomethingElseThanAJoinAreDisconnected) {
  start(std::chrono::minutes(10), 8);
  for (const std::string& text :
       {std::string("{\"beat\":true}\n"), std::string("{\"succeeded\":true}\n"),
        std::string("{\"leave\":{\"reason\":\"\"}}\n"), std::string("GET / HTTP/1.1\r\n"),
        std::string("\n"), std::string(30'000, 'x')}) {
    const Descriptor stranger = connect();
    send_all(stranger, text);
    ASSERT_TRUE(eventually([&] { return is_closed(stranger); })) << text.substr(0, 40);
  }
}

// Otherwise one connection could occupy node 0's launcher, and fill its memory with answers.
TEST_F(Strangers, GetOneAnswerHoweverOftenTheyAsk) {
  start(std::chrono::minutes(10), 8);
  const Descriptor stranger = connect();
  std::string joins;
  for (int i = 0; i < 1000; ++i) joins += "{\"join\":{\"protocol\":0}}\n";
  send_all(stranger, joins);
  std::string answer;
  EXPECT_TRUE(eventually([&] { return receive_to_end(stranger, answer); }));
  EXPECT_EQ(std::count(answer.begin(), answer.end(), '\n'), 1) << answer.substr(0, 400);
  EXPECT_THAT(answer, HasSubstr("the node has another version of Semitone"));
}

TEST_F(Strangers, WhoAreRefusedDoNotKeepTheirPlace) {
  start(std::chrono::minutes(10), 1);
  const Descriptor stranger = connect();
  send_all(stranger, "{\"join\":{\"protocol\":0}}\n");
  // It does not close the connection.
  std::string answer;
  EXPECT_TRUE(eventually([&] {
    receive_to_end(stranger, answer);
    return !answer.empty();
  }));
  Join join;
  join.min_nodes = join.max_nodes = 2;
  EXPECT_TRUE(begins_with(join));
}

TEST_F(Strangers, MayHaveTheLongestNamesThatALauncherHas) {
  Job named = job();
  named.named = true;
  named.run_id = std::string(255, '\\');
  named.token = std::string(1024, '"');
  start(std::chrono::minutes(10), 8, named);
  Join join;
  join.run_id = named.run_id;
  join.token = named.token;
  join.min_nodes = join.max_nodes = 2;
  join.program = std::string(255, '\1');
  join.host = std::string(64, '\1');
  EXPECT_GT(encode(join).size(), 4500U);
  EXPECT_TRUE(begins_with(join));
}

TEST_F(Strangers, AreKeptUpToALimitAndALauncherJoinsAfterThem) {
  start(std::chrono::minutes(1), 8);
  std::vector<Descriptor> strangers;
  strangers.reserve(12);
  for (int i = 0; i < 12; ++i) strangers.push_back(connect());
  const auto closed = [&] { return std::count_if(strangers.begin(), strangers.end(), is_closed); };
  EXPECT_TRUE(eventually([&] { return closed() == 4; }));
  strangers.clear();
  Join join;
  join.min_nodes = join.max_nodes = 2;
  EXPECT_TRUE(begins_with(join));
}

using NodeZero = Strangers;

TEST_F(NodeZero, EndsAlthoughAForkedProcessHasCopiesOfItsDescriptors) {
  start(std::chrono::minutes(10), 8);
  auto copies = std::make_unique<ForkedProcess>();
  auto end = std::async(std::launch::async, [&] { coordinator_.reset(); });
  EXPECT_TRUE(eventually(
      [&] { return end.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));
  // Otherwise a failed test would not end.
  copies.reset();
}

TEST_F(NodeZero, DoesNotAnswerStrangersOnceTheJobIsOver) {
  start(std::chrono::minutes(10), 8);
  const Descriptor stranger = connect();
  Join join;
  join.min_nodes = join.max_nodes = 2;
  host_->send(join);
  host_->send(Leave{"it was stopped"});
  EXPECT_TRUE(eventually(
      [&] { return net::connect_to(address_, std::chrono::seconds(1)).error == ECONNREFUSED; }));
  send_all(stranger, encode(join) + "\n");
  std::string answer;
  EXPECT_TRUE(eventually([&] { return receive_to_end(stranger, answer); }));
  EXPECT_EQ(answer, "");
}

}  // namespace
}  // namespace semitone::launch
