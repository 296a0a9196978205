#include "src/comm/rendezvous.h"

#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "src/comm/backends.h"
#include "src/comm/introduction.h"
#include "src/comm/machine.h"
#include "src/comm/store.h"
#include "src/core/env.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

namespace semitone::comm {
namespace {

using test::Environment;
using test::expect_error;

constexpr auto kEnv = "env://";

// Removes the variables of all launchers.
class RendezvousTest : public ::testing::Test {
 protected:
  Environment environment_{{"RANK",
                            "WORLD_SIZE",
                            "LOCAL_RANK",
                            "LOCAL_WORLD_SIZE",
                            "MASTER_ADDR",
                            "MASTER_PORT",
                            "TORCHELASTIC_USE_AGENT_STORE",
                            "TORCHELASTIC_RESTART_COUNT",
                            "SLURM_PROCID",
                            "SLURM_NTASKS",
                            "SLURM_STEP_NUM_TASKS",
                            "SLURM_LOCALID",
                            "SLURM_NODEID",
                            "SLURM_STEP_TASKS_PER_NODE",
                            "SLURM_JOB_NODELIST",
                            "SLURM_STEP_NODELIST",
                            "SLURM_JOB_ID",
                            "SLURM_STEP_ID",
                            "OMPI_COMM_WORLD_RANK",
                            "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_RANK",
                            "OMPI_COMM_WORLD_LOCAL_SIZE",
                            "PMIX_NAMESPACE",
                            "MV2_COMM_WORLD_RANK",
                            "MV2_COMM_WORLD_SIZE",
                            "MV2_COMM_WORLD_LOCAL_RANK",
                            "MV2_COMM_WORLD_LOCAL_SIZE",
                            "PMI_RANK",
                            "PMI_SIZE",
                            "MPI_LOCALRANKID",
                            "MPI_LOCALNRANKS",
                            "PMI_LOCAL_RANK",
                            "PMI_LOCAL_SIZE",
                            "PALS_LOCAL_RANKID",
                            "PALS_LOCAL_SIZE",
                            "PALS_APID",
                            "SEMITONE_COMM_CHECK",
                            "GLOO_SOCKET_IFNAME"}};
};

class EnvironmentUrl : public RendezvousTest {};
class TcpUrl : public RendezvousTest {};
class FileUrl : public RendezvousTest {};
class Init : public RendezvousTest {};

TEST_F(EnvironmentUrl, IsASingleProcessWithoutALauncher) {
  const Rendezvous rendezvous = parse_rendezvous(kEnv);
  EXPECT_EQ(rendezvous.rank, 0);
  EXPECT_EQ(rendezvous.world_size, 1);
}

TEST_F(EnvironmentUrl, ReadsTorchrunsVariables) {
  environment_.set({{"RANK", "5"},
                    {"WORLD_SIZE", "8"},
                    {"LOCAL_RANK", "1"},
                    {"LOCAL_WORLD_SIZE", "4"},
                    {"MASTER_ADDR", "node7"},
                    {"MASTER_PORT", "29501"}});
  const Rendezvous rendezvous = parse_rendezvous(kEnv);
  EXPECT_EQ(rendezvous.kind, Rendezvous::Kind::tcp);
  EXPECT_EQ(rendezvous.rank, 5);
  EXPECT_EQ(rendezvous.world_size, 8);
  EXPECT_EQ(rendezvous.local_rank, 1);
  EXPECT_EQ(rendezvous.local_world_size, 4);
  EXPECT_EQ(rendezvous.host, "node7");
  EXPECT_EQ(rendezvous.port, 29501);
  EXPECT_FALSE(rendezvous.store_is_hosted);
  environment_.set({{"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  EXPECT_TRUE(parse_rendezvous(kEnv).store_is_hosted);
}

TEST_F(EnvironmentUrl, NamesTheVariableThatIsMissing) {
  const std::map<std::string, std::string> all = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29501"}};
  for (const auto& [missing, value] : all) {
    auto others = all;
    others[missing] = "";
    environment_.set(others);
    expect_error([] { parse_rendezvous(kEnv); }, {"[comm.init]", missing, "torchrun"});
  }
}

TEST_F(EnvironmentUrl, RefusesValuesThatMakeNoSense) {
  const std::map<std::string, std::string> good = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29501"}};
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"RANK", "2"},        {"RANK", "-1"},           {"RANK", "one"},
      {"RANK", "1x"},       {"WORLD_SIZE", "0"},      {"WORLD_SIZE", "many"},
      {"MASTER_PORT", "0"}, {"MASTER_PORT", "65536"}, {"LOCAL_RANK", "x"}};
  for (const auto& [name, value] : bad) {
    auto values = good;
    values[name] = value;
    environment_.set(values);
    expect_error([] { parse_rendezvous(kEnv); }, {name, "'" + value + "'"});
    environment_.set({{"LOCAL_RANK", ""}});
  }
}

TEST_F(EnvironmentUrl, ReadsSlurmsVariables) {
  environment_.set({{"SLURM_PROCID", "3"},
                    {"SLURM_NTASKS", "16"},  // the job's, not the step's
                    {"SLURM_STEP_NUM_TASKS", "4"},
                    {"SLURM_LOCALID", "1"},
                    {"SLURM_NODEID", "1"},
                    {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                    {"SLURM_JOB_NODELIST", "gpu[01-12]"},
                    {"SLURM_STEP_NODELIST", "gpu[07-08,12]"},
                    {"SLURM_JOB_ID", "4711"},
                    {"SLURM_STEP_ID", "0"}});
  const Rendezvous rendezvous = parse_rendezvous(kEnv);
  EXPECT_EQ(rendezvous.rank, 3);
  EXPECT_EQ(rendezvous.world_size, 4);
  EXPECT_EQ(rendezvous.local_rank, 1);
  EXPECT_EQ(rendezvous.local_world_size, 2);
  EXPECT_EQ(rendezvous.host, "gpu07");
  EXPECT_GE(rendezvous.port, 1024);
  EXPECT_EQ(rendezvous.port, parse_rendezvous(kEnv).port);
  environment_.set({{"SLURM_STEP_ID", "1"}});
  EXPECT_NE(rendezvous.port, parse_rendezvous(kEnv).port);
  environment_.set({{"SLURM_STEP_ID", "0"}, {"SLURM_JOB_ID", "4712"}});
  EXPECT_NE(rendezvous.port, parse_rendezvous(kEnv).port);
  environment_.set({{"SLURM_STEP_NODELIST", "alpha,beta[1-3]"}});
  EXPECT_EQ(parse_rendezvous(kEnv).host, "alpha");
  environment_.set({{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29501"}});
  EXPECT_EQ(parse_rendezvous(kEnv).host, "10.0.0.1");
  EXPECT_EQ(parse_rendezvous(kEnv).port, 29501);
}

TEST_F(EnvironmentUrl, CountsTheTasksOfItsOwnNodeUnderSlurm) {
  environment_.set({{"SLURM_PROCID", "7"},
                    {"SLURM_STEP_NUM_TASKS", "8"},
                    {"SLURM_STEP_TASKS_PER_NODE", "3,2(x2),1"}});
  const std::vector<int> counts = {3, 2, 2, 1};
  for (std::size_t node = 0; node < counts.size(); ++node) {
    environment_.set({{"SLURM_NODEID", std::to_string(node)}});
    EXPECT_EQ(parse_rendezvous(kEnv).local_world_size, counts[node]) << node;
  }
  environment_.set({{"SLURM_NODEID", "4"}});
  expect_error([] { parse_rendezvous(kEnv); }, {"SLURM_STEP_TASKS_PER_NODE", "fewer nodes"});
  for (const char* nonsense : {"x", "3,", "2(x", "2(x)", "2(x2", "(x2)"}) {
    SCOPED_TRACE(nonsense);
    environment_.set({{"SLURM_STEP_TASKS_PER_NODE", nonsense}});
    expect_error([] { parse_rendezvous(kEnv); }, {"SLURM_STEP_TASKS_PER_NODE"});
  }
}

TEST_F(EnvironmentUrl, IsASingleProcessInABatchScriptOfSlurm) {
  environment_.set({{"SLURM_PROCID", "0"},
                    {"SLURM_NTASKS", "4"},
                    {"SLURM_LOCALID", "0"},
                    {"SLURM_NODEID", "0"},
                    {"SLURM_JOB_NODELIST", "gpu[07-08]"},
                    {"SLURM_JOB_ID", "4711"}});
  EXPECT_EQ(parse_rendezvous(kEnv).world_size, 1);
}

TEST_F(EnvironmentUrl, TakesTheLauncherThatIsClosestToTheProcess) {
  // mpirun in a batch script, and in a step, whose variables all of its processes have.
  environment_.set({{"SLURM_PROCID", "0"},
                    {"SLURM_NTASKS", "4"},
                    {"SLURM_JOB_NODELIST", "gpu[07-08]"},
                    {"OMPI_COMM_WORLD_RANK", "2"},
                    {"OMPI_COMM_WORLD_SIZE", "3"},
                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"}});
  EXPECT_EQ(parse_rendezvous(kEnv).rank, 2);
  environment_.set({{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_STEP_ID", "0"}});
  EXPECT_EQ(parse_rendezvous(kEnv).rank, 2);
  EXPECT_EQ(parse_rendezvous(kEnv).world_size, 3);
  environment_.set(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29501"}});
  EXPECT_EQ(parse_rendezvous(kEnv).rank, 1);
  EXPECT_EQ(parse_rendezvous(kEnv).world_size, 2);
}

TEST_F(EnvironmentUrl, ReadsOpenMpisVariables) {
  environment_.set({{"OMPI_COMM_WORLD_RANK", "1"},
                    {"OMPI_COMM_WORLD_SIZE", "2"},
                    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  const Rendezvous rendezvous = parse_rendezvous(kEnv);
  EXPECT_EQ(rendezvous.rank, 1);
  EXPECT_EQ(rendezvous.world_size, 2);
  EXPECT_EQ(rendezvous.host, "127.0.0.1");
  environment_.set({{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}});
  expect_error([] { parse_rendezvous(kEnv); }, {"MASTER_ADDR", "mpirun"});
}

// MPICH, Intel MPI; Cray PALS with and without Cray's PMI; MVAPICH2.
TEST_F(EnvironmentUrl, ReadsTheVariablesOfOtherMpis) {
  const std::vector<std::map<std::string, std::string>> launchers = {
      {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}},
      {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}, {"PMI_LOCAL_RANK", "1"}, {"PMI_LOCAL_SIZE", "4"}},
      {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}, {"PALS_LOCAL_RANKID", "1"}, {"PALS_LOCAL_SIZE", "4"}},
      {{"MV2_COMM_WORLD_RANK", "5"},
       {"MV2_COMM_WORLD_SIZE", "8"},
       {"MV2_COMM_WORLD_LOCAL_RANK", "1"},
       {"MV2_COMM_WORLD_LOCAL_SIZE", "4"}}};
  for (const auto& launcher : launchers) {
    SCOPED_TRACE(launcher.begin()->first);
    environment_.set(launcher);
    expect_error([] { parse_rendezvous(kEnv); }, {"MASTER_ADDR", "several machines", "MASTER_ADDR",
                                                  "<address of rank 0's machine>"});
    environment_.set({{"MASTER_ADDR", "node7"}});
    const Rendezvous rendezvous = parse_rendezvous(kEnv);
    EXPECT_EQ(rendezvous.rank, 5);
    EXPECT_EQ(rendezvous.world_size, 8);
    EXPECT_EQ(rendezvous.local_rank, 1);
    EXPECT_EQ(rendezvous.local_world_size, 4);
    EXPECT_EQ(rendezvous.host, "node7");
    environment_.set({{"MASTER_PORT", "29501"}});
    EXPECT_EQ(parse_rendezvous(kEnv).port, 29501);
    environment_.set({{"MASTER_ADDR", ""}, {"MASTER_PORT", ""}});
    // All on this machine.
    for (const auto& [name, value] : launcher) {
      if (value == "4") environment_.set({{name, "8"}});
    }
    EXPECT_EQ(parse_rendezvous(kEnv).host, "127.0.0.1");
    for (const auto& [name, value] : launcher) environment_.set({{name, ""}});
  }
  environment_.set({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}});
  expect_error([] { parse_rendezvous(kEnv); }, {"MASTER_ADDR", "how many of the ranks"});
  environment_.set({{"PMI_SIZE", ""}});
  expect_error([] { parse_rendezvous(kEnv); }, {"PMI_SIZE", "nothing", "mpiexec"});
  environment_.set({{"PMI_SIZE", "1"}});
  EXPECT_EQ(parse_rendezvous(kEnv).world_size, 1);
}

TEST_F(EnvironmentUrl, TakesSrunsOwnVariablesWhereItSetsThoseOfPmiToo) {
  environment_.set({{"SLURM_PROCID", "3"},
                    {"SLURM_STEP_NUM_TASKS", "4"},
                    {"SLURM_STEP_NODELIST", "gpu[07-08]"},
                    {"PMI_RANK", "3"},
                    {"PMI_SIZE", "4"}});
  EXPECT_EQ(parse_rendezvous(kEnv).host, "gpu07");
  // Hydra starts its helpers by srun, one on each node.
  environment_.set({{"SLURM_PROCID", "1"},
                    {"SLURM_STEP_NUM_TASKS", "2"},
                    {"MPI_LOCALNRANKS", "2"},
                    {"MASTER_ADDR", "node7"}});
  EXPECT_EQ(parse_rendezvous(kEnv).rank, 3);
  EXPECT_EQ(parse_rendezvous(kEnv).world_size, 4);
  EXPECT_EQ(parse_rendezvous(kEnv).host, "node7");
}

TEST_F(EnvironmentUrl, ReadsTheFirstOfSlurmsNodes) {
  environment_.set({{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "4"}});
  const std::map<std::string, std::string> first_of = {
      {"rack[1-2]-n[01-04]", "rack1-n01"},
      {"node[01-02]-ib", "node01-ib"},
      {"node[01-03,07],other", "node01"},
      {"r1i[0-3]n[0-8]", "r1i0n0"},
      {"node[007]", "node007"},
      {"alone", "alone"},
      {"node[", "node"},
  };
  for (const auto& [list, node] : first_of) {
    environment_.set({{"SLURM_STEP_NODELIST", list}});
    EXPECT_EQ(parse_rendezvous(kEnv).host, node);
  }
}

// Linux gives ports from 32768 on to connections.
TEST_F(EnvironmentUrl, ChoosesPortsThatNoConnectionGets) {
  environment_.set({{"SLURM_PROCID", "1"},
                    {"SLURM_STEP_NUM_TASKS", "4"},
                    {"SLURM_STEP_NODELIST", "node1"},
                    {"OMPI_COMM_WORLD_SIZE", "2"},
                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  for (int job = 0; job < 200; ++job) {
    environment_.set({{"OMPI_COMM_WORLD_RANK", job % 2 == 0 ? "1" : ""},
                      {"OMPI_COMM_WORLD_SIZE", job % 2 == 0 ? "2" : ""},
                      {"PMIX_NAMESPACE", std::to_string(job)},
                      {"SLURM_JOB_ID", std::to_string(job)}});
    const int port = parse_rendezvous(kEnv).port;
    EXPECT_GE(port, 20000) << job;
    EXPECT_LT(port, 32768) << job;
  }
}

TEST_F(EnvironmentUrl, LeavesLocalRanksOpenWhereNothingTellsThem) {
  // As Kubernetes operators do.
  environment_.set(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "job-0"}, {"MASTER_PORT", "29501"}});
  EXPECT_EQ(parse_rendezvous(kEnv).local_rank, std::nullopt);
  EXPECT_EQ(parse_rendezvous(kEnv).local_world_size, std::nullopt);
  EXPECT_EQ(parse_rendezvous("tcp://node7:4000?rank=1&world_size=2").local_world_size,
            std::nullopt);
  EXPECT_EQ(parse_rendezvous("tcp://localhost:4000?rank=1&world_size=2").local_world_size, 2);
}

TEST_F(EnvironmentUrl, OptionsComeBeforeTheEnvironment) {
  environment_.set(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29501"}});
  const Rendezvous rendezvous = parse_rendezvous(kEnv, InitOptions().rank(2).world_size(3));
  EXPECT_EQ(rendezvous.rank, 2);
  EXPECT_EQ(rendezvous.world_size, 3);
  expect_error([] { parse_rendezvous(kEnv, InitOptions().rank(2)); }, {"rank", "'2'"});
  expect_error([] { parse_rendezvous(kEnv, InitOptions().world_size(1)); },
               {"RANK from 0 to 0", "'1'"});
}

TEST_F(EnvironmentUrl, OptionsAloneNeedAMaster) {
  const auto options = InitOptions().rank(1).world_size(3);
  expect_error([&] { parse_rendezvous(kEnv, options); }, {"MASTER_ADDR", "torchrun"});
  environment_.set({{"MASTER_ADDR", "node7"}});
  expect_error([&] { parse_rendezvous(kEnv, options); }, {"MASTER_PORT", "torchrun"});
  environment_.set({{"MASTER_PORT", "29501"}});
  const Rendezvous rendezvous = parse_rendezvous(kEnv, options);
  EXPECT_EQ(rendezvous.rank, 1);
  EXPECT_EQ(rendezvous.world_size, 3);
  EXPECT_EQ(rendezvous.host, "node7");
  EXPECT_EQ(rendezvous.port, 29501);
  expect_error([] { parse_rendezvous(kEnv, InitOptions().world_size(3)); }, {"RANK", "nothing"});
  expect_error([] { parse_rendezvous(kEnv, InitOptions().rank(1)); }, {"WORLD_SIZE", "nothing"});
  EXPECT_EQ(parse_rendezvous(kEnv, InitOptions().rank(0).world_size(1)).world_size, 1);
}

TEST_F(TcpUrl, SaysAll) {
  const Rendezvous rendezvous = parse_rendezvous("tcp://10.1.2.3:4000?rank=1&world_size=4");
  EXPECT_EQ(rendezvous.kind, Rendezvous::Kind::tcp);
  EXPECT_EQ(rendezvous.host, "10.1.2.3");
  EXPECT_EQ(rendezvous.port, 4000);
  EXPECT_EQ(rendezvous.rank, 1);
  EXPECT_EQ(rendezvous.world_size, 4);
  EXPECT_EQ(parse_rendezvous("tcp://[::1]:4000?rank=0&world_size=2").host, "::1");
  EXPECT_EQ(parse_rendezvous("tcp://a:1", InitOptions().rank(1).world_size(2)).rank, 1);
}

TEST_F(TcpUrl, ErrorsSayWhatIsWrong) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"tcp://host?rank=0&world_size=2", "tcp://HOST:PORT"},
      {"tcp://:4000?rank=0&world_size=2", "tcp://HOST:PORT"},
      {"tcp://[]:4000?rank=0&world_size=2", "tcp://HOST:PORT"},
      {"tcp://host:?rank=0&world_size=2", "the port"},
      {"tcp://host:99999?rank=0&world_size=2", "the port"},
      {"tcp://host:4000?rank=0", "world_size"},
      {"tcp://host:4000?world_size=2", "rank"},
      {"tcp://host:4000?rank=2&world_size=2", "rank from 0 to 1"},
      {"tcp://host:4000?rank=&world_size=2", "rank"},
      {"tcp://host:4000?rank=0&world_size=2&color=red", "color=red"},
      {"http://host:4000", "env://"},
      {"", "env://"},
  };
  for (const auto& [url, part] : cases) {
    SCOPED_TRACE(url);
    expect_error([&url = url] { parse_rendezvous(url); }, {"[comm.init]", part});
  }
}

TEST_F(FileUrl, NeedsAnAbsolutePath) {
  const Rendezvous rendezvous = parse_rendezvous("file:///tmp/meet?rank=1&world_size=2");
  EXPECT_EQ(rendezvous.kind, Rendezvous::Kind::file);
  EXPECT_EQ(rendezvous.path, "/tmp/meet");
  EXPECT_EQ(rendezvous.rank, 1);
  expect_error([] { parse_rendezvous("file://meet?rank=1&world_size=2"); }, {"file:///"});
  expect_error([] { parse_rendezvous("file://?rank=1&world_size=2"); }, {"file:///"});
  expect_error([] { init("file:///no/such/folder/meet?rank=1&world_size=2"); },
               {"folder", "/no/such/folder/meet"});
}

TEST_F(FileUrl, NeedsAnInterfaceForRanksOfOtherMachines) {
  const test::TemporaryFolder folder;
  const std::string path = (folder / "meet").string();
  // Rank 1, as it introduces itself.
  c10d::PrefixStore store("semitone/0", c10::make_intrusive<c10d::FileStore>(path, 2));
  put(store, "rank/1", "2 gloo calls elsewhere");
  expect_error(
      [&] {
        init("file://" + path + "?rank=0&world_size=2",
             InitOptions().backend("gloo").check(CheckLevel::calls));
      },
      {"interface", "rank 1 on 'elsewhere'", "GLOO_SOCKET_IFNAME"});
}

// As with "auto" if one machine has a visible GPU and the other has none.
TEST_F(FileUrl, RanksNeedTheSameBackend) {
  const test::TemporaryFolder folder;
  for (const int rank : {0, 1}) {
    SCOPED_TRACE(rank);
    const std::string path = (folder / std::to_string(rank)).string();
    c10d::PrefixStore store("semitone/0", c10::make_intrusive<c10d::FileStore>(path, 2));
    const std::string other = std::to_string(1 - rank);
    put(store, "rank/" + other, "2 nccl calls " + to_string(this_machine()));
    store.add("have_read", 1);  // rank 0 waits for this
    const std::string message = test::message_of<CommError>([&] {
      init(fmt::format("file://{}?rank={}&world_size=2", path, rank),
           InitOptions().backend("gloo").check(CheckLevel::calls).timeout(std::chrono::minutes(2)));
    });
    EXPECT_NE(message.find("the backend gloo on all ranks, got nccl on rank " + other),
              std::string::npos)
        << message;
  }
}

TEST_F(Init, OptionsRefuseWhatMakesNoSense) {
  expect_error([] { InitOptions().backend("pigeon"); }, {"gloo", "'pigeon'"});
  expect_error([] { InitOptions().backend("mpi"); }, {"gloo", "'mpi'", "mpirun"});
  expect_error([] { InitOptions().timeout(std::chrono::seconds(0)); }, {"timeout"});
  expect_error([] { InitOptions().heartbeat(std::chrono::milliseconds(1)); }, {"heartbeat"});
  expect_error([] { init(kEnv, InitOptions().heartbeat_timeout(std::chrono::seconds(1))); },
               {"heartbeat timeout", "1000 ms"});
  // The silence of a stopped rank would begin anew at each check.
  expect_error([] { init(kEnv, InitOptions().heartbeat_timeout(std::chrono::milliseconds(2500))); },
               {"at least three heartbeats", "2500 ms"});
}

TEST_F(Init, OptionsLimitDurations) {
  using std::chrono::milliseconds;
  const std::chrono::days longest(24);
  const auto never = InitOptions()
                         .timeout(milliseconds::max())
                         .heartbeat(milliseconds::max())
                         .heartbeat_timeout(milliseconds::max());
  EXPECT_EQ(never.timeout(), longest);
  EXPECT_EQ(never.heartbeat(), longest);
  EXPECT_EQ(never.heartbeat_timeout(), longest);
  EXPECT_EQ(InitOptions().timeout(longest - milliseconds(1)).timeout(), longest - milliseconds(1));
  expect_error([&] { init(kEnv, never); }, {"at least three heartbeats"});
  expect_error([] { InitOptions().timeout(milliseconds::min()); }, {"timeout"});
}

TEST(Introductions, AreReadAsTheyAreWritten) {
  const Introduction written{"3", "gloo", "full", {"host", "kernel", "net:[1]"}};
  const Introduction read = parse_introduction(to_string(written));
  EXPECT_EQ(read.world_size, "3");
  EXPECT_EQ(read.backend, "gloo");
  EXPECT_EQ(read.check_level, "full");
  EXPECT_EQ(to_string(read.machine), to_string(written.machine));
}

TEST(Introductions, OfAnyTextHaveFields) {
  for (const std::string& text :
       {std::string(), std::string(" "), std::string("2"), std::string("2 gloo"),
        std::string("  \n\0 x", 6), std::string(100'000, 'x'), std::string(100'000, ' ')}) {
    const Introduction own{"2", "gloo", "calls", {}};
    EXPECT_THROW(require_equal_settings(own, {own, parse_introduction(text)}), CommError);
  }
  EXPECT_EQ(parse_introduction("2 gloo calls").machine.host, "");
  EXPECT_EQ(parse_introduction("2 gloo calls a b c and more").machine.network, "c");
}

TEST(Introductions, ThatDifferNameAllRanksWithTheirValues) {
  const Introduction own{"4", "gloo", "calls", {}};
  auto of_world = own;
  of_world.world_size = "5";
  of_world.backend = "nccl";  // the first difference counts
  auto full = own;
  full.check_level = "full";
  auto none = own;
  none.check_level = "none";
  EXPECT_NO_THROW(require_equal_settings(own, {own, own, own, own}));
  expect_error([&] { require_equal_settings(own, {own, of_world, full, own}); },
               {"[comm.init]", "a world size of 4 on all ranks, got 5 on rank 1"});
  try {
    require_equal_settings(own, {full, none, own, full});
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    EXPECT_EQ(error.ranks(), (std::vector<int>{0, 1, 3}));
    EXPECT_NE(
        std::string(error.what())
            .find("the check level calls on all ranks, got full on ranks 0, 3, none on rank 1"),
        std::string::npos)
        << error.what();
  }
}

TEST_F(Init, RefusesABackendThatIsNotThere) {
  EXPECT_TRUE(has_backend("gloo"));
  EXPECT_FALSE(has_backend("mpi"));
  if (has_backend("nccl")) return;
  expect_error([] { init(kEnv, InitOptions().backend("nccl")); }, {"nccl", "gloo"});
}

TEST_F(Init, EveryBackendCanBeMadeOrTellsHowToBuildIt) {
  for (const Backend& backend : backends()) {
    SCOPED_TRACE(backend.name);
    const std::string name(backend.name);
    EXPECT_NO_THROW(InitOptions().backend(name));
    EXPECT_EQ(has_backend(name), backend.available);
    EXPECT_EQ(backend.make != nullptr, backend.available);
    if (backend.available) continue;
    const std::string remedy(backend.remedy);
    EXPECT_FALSE(remedy.empty());
    expect_error([&] { init(kEnv, InitOptions().backend(name)); },
                 {name, "use gloo, or " + remedy});
  }
}

TEST_F(Init, RefusesAnUnknownCheckLevel) {
  environment_.set({{"SEMITONE_COMM_CHECK", "sometimes"}});
  expect_error([] { init(kEnv); }, {"SEMITONE_COMM_CHECK", "'sometimes'"});
}

TEST_F(Init, RefusesAnInterfaceThatIsNotThereAndNamesThoseThatAre) {
  const std::string url = "tcp://127.0.0.1:1?rank=0&world_size=2";
  expect_error([&] { init(url, InitOptions().interface("eth99")); }, {"'eth99'", "lo"});
  environment_.set({{"GLOO_SOCKET_IFNAME", "eth98"}});
  expect_error([&] { init(url); }, {"'eth98'"});
}

TEST_F(Init, NamesAMasterThatCannotBeResolvedWithinTheTimeout) {
  for (const char* const rank : {"0", "1"}) {
    SCOPED_TRACE(rank);
    const std::string url =
        fmt::format("tcp://no-such-host.invalid:4000?rank={}&world_size=2", rank);
    expect_error([&] { init(url, InitOptions().timeout(std::chrono::milliseconds(1500))); },
                 {"[comm.init]", "a master address that can be resolved",
                  "'no-such-host.invalid': ", ", for 1.5 s"});
  }
}

TEST_F(Init, NamesALoopbackMasterThatNothingAnswersAt) {
  environment_.set({{"RANK", "1"},
                    {"WORLD_SIZE", "2"},
                    {"LOCAL_WORLD_SIZE", "1"},
                    {"MASTER_ADDR", "127.0.0.1"},
                    {"MASTER_PORT", "1"}});
  expect_error([] { init(kEnv, InitOptions().timeout(std::chrono::seconds(1))); },
               {"127.0.0.1:1", "only this machine", "MASTER_ADDR"});
}

TEST_F(Init, RefusesABindAddressOfAnotherMachine) {
  expect_error(
      [] {
        init("tcp://127.0.0.1:1?rank=0&world_size=2", InitOptions().bind_address("192.0.2.1"));
      },
      {"listen on 192.0.2.1:1"});
}

}  // namespace
}  // namespace semitone::comm
