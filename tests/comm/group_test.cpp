#include "semitone/comm/group.h"

#include "semitone/comm/init.h"
#include "src/comm/process_group.h"
#include "src/net/address.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/run_ranks.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>

namespace semitone::comm {
namespace {

using test::expect_error;
using test::Rank;
using test::run_ranks;

// Exact in every dtype: 0 … 5, shifted by the rank.
at::Tensor values_of(int rank, at::ScalarType dtype) {
  return (torch::arange(6, torch::kFloat).view({2, 3}) + rank).to(dtype);
}

void expect_equal(const at::Tensor& got, const at::Tensor& want) {
  EXPECT_TRUE(got.dtype() == want.dtype() && got.sizes() == want.sizes() && torch::equal(got, want))
      << got << "\n"
      << want;
}

TEST(SingleProcess, EveryCollectiveReturnsAtOnce) {
  const Group group;
  EXPECT_EQ(group.rank(), 0);
  EXPECT_EQ(group.size(), 1);
  EXPECT_EQ(group.backend(), "none");
  at::Tensor tensor = values_of(3, torch::kFloat);
  group.all_reduce(tensor, ReduceOp::mean);
  group.broadcast(tensor);
  group.broadcast(std::vector<at::Tensor>{tensor});
  group.barrier();
  group.monitored_barrier(std::chrono::seconds(1));
  Work work = group.all_reduce_async(tensor);
  EXPECT_TRUE(work.done());
  work.wait();
  expect_equal(tensor, values_of(3, torch::kFloat));
  expect_equal(group.all_gather(tensor).at(0), tensor);
  expect_equal(group.reduce_scatter(tensor), tensor);
  EXPECT_EQ(group.broadcast(std::string("text")), "text");
  EXPECT_EQ(group.all_gather(std::string("text")), std::vector<std::string>{"text"});
  EXPECT_EQ(group.split(1).size(), 1);
  EXPECT_EQ(group.subgroup({0}).size(), 1);
}

TEST(SingleProcess, RefusesTheSameTensorsAsSeveral) {
  const Group group;
  at::Tensor undefined;
  expect_error([&] { group.all_reduce(undefined); }, {"[comm.all_reduce]", "undefined"});
  at::Tensor transposed = values_of(0, torch::kFloat).t();
  expect_error([&] { group.broadcast(transposed); }, {"[comm.broadcast]", "contiguous", "[1, 3]"});
  at::Tensor sparse = values_of(0, torch::kFloat).to_sparse();
  expect_error([&] { group.all_gather(sparse); }, {"[comm.all_gather]", "sparse"});
  const at::Tensor waves = torch::zeros({2}, torch::kComplexFloat);
  expect_error([&] { group.all_gather(waves.conj()); }, {"[comm.all_gather]", "resolve_conj"});
  expect_error([&] { group.broadcast(std::vector<at::Tensor>{waves.conj()}); },
               {"[comm.broadcast]", "resolve_conj"});
  at::Tensor integers = values_of(0, torch::kLong);
  expect_error([&] { group.all_reduce(integers, ReduceOp::mean); }, {"floating-point", "int64"});
  at::Tensor tensor = values_of(0, torch::kFloat);
  expect_error([&] { group.broadcast(tensor, 1); }, {"root", "0 to 0"});
  at::Tensor scalar = torch::zeros({});
  expect_error([&] { group.reduce_scatter(scalar); }, {"[comm.reduce_scatter]", "multiple"});
  expect_error([&] { group.split(2); }, {"[comm.split]", "divides"});
  expect_error([&] { group.subgroup({}); }, {"[comm.subgroup]"});
  expect_error([&] { group.subgroup({0, 0}); }, {"[comm.subgroup]"});
  expect_error([&] { group.subgroup({1}); }, {"[comm.subgroup]"});
}

TEST(Collectives, AreRightForEveryDtype) {
  run_ranks(4, [](Rank& rank) {
    const Group group = init();
    EXPECT_EQ(group.rank(), rank.number());
    EXPECT_EQ(group.size(), 4);
    EXPECT_EQ(group.backend(), "gloo");
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16,
                             torch::kLong, torch::kInt, torch::kChar, torch::kByte}) {
      SCOPED_TRACE(dtype);
      const auto reduced = [&](ReduceOp op) {
        at::Tensor tensor = values_of(rank.number(), dtype);
        group.all_reduce(tensor, op);
        return tensor;
      };
      const at::Tensor base = values_of(0, dtype);
      expect_equal(reduced(ReduceOp::sum), base * 4 + 6);
      expect_equal(reduced(ReduceOp::min), base);
      expect_equal(reduced(ReduceOp::max), base + 3);
      if (base.is_floating_point()) expect_equal(reduced(ReduceOp::mean), base + 1.5);
      at::Tensor twos = torch::full({3}, 2, dtype);
      group.all_reduce(twos, ReduceOp::product);
      expect_equal(twos, torch::full({3}, 16, dtype));

      at::Tensor sent = values_of(rank.number(), dtype);
      group.broadcast(sent, 2);
      expect_equal(sent, values_of(2, dtype));

      const auto gathered = group.all_gather(values_of(rank.number(), dtype));
      ASSERT_EQ(gathered.size(), 4u);
      for (int peer = 0; peer < 4; ++peer) {
        expect_equal(gathered[static_cast<std::size_t>(peer)], values_of(peer, dtype));
      }

      const at::Tensor rows = (torch::arange(8).view({8, 1}) + rank.number()).to(dtype);
      expect_equal(group.reduce_scatter(rows),
                   ((torch::arange(8).view({8, 1}) * 4 + 6).to(dtype))
                       .slice(0, 2 * rank.number(), 2 * rank.number() + 2));
    }
  });
}

TEST(Collectives, OfOtherKindsAreRight) {
  run_ranks(2, [](Rank& rank) {
    const Group group = init();
    // Many tensors of several dtypes and shapes, empty ones among them.
    std::vector<at::Tensor> tensors = {torch::full({3}, rank.number(), torch::kFloat),
                                       torch::full({2, 2}, rank.number(), torch::kHalf),
                                       torch::full({0}, rank.number(), torch::kFloat),
                                       torch::full({}, rank.number(), torch::kLong),
                                       torch::full({5}, rank.number(), torch::kFloat)};
    group.broadcast(tensors, 1);
    // In whatever order their elements lie.
    const auto numbers = torch::arange(24.F).view({1, 2, 3, 4});
    std::vector<at::Tensor> laid_out{rank.number() == 1 ? numbers.clone()
                                                        : torch::zeros({1, 2, 3, 4})};
    if (rank.number() != 2) laid_out[0] = laid_out[0].contiguous(at::MemoryFormat::ChannelsLast);
    group.broadcast(laid_out, 1);
    EXPECT_TRUE(torch::equal(laid_out[0], numbers));
    for (const at::Tensor& tensor : tensors) expect_equal(tensor, torch::ones_like(tensor));
    // Parameters, which need gradients.
    std::vector<at::Tensor> parameters = {
        torch::full({3}, 1.0 * rank.number(), torch::requires_grad())};
    group.broadcast(parameters, 1);
    EXPECT_EQ(parameters[0].sum().item<float>(), 3.f);
    EXPECT_TRUE(parameters[0].is_leaf());

    at::Tensor empty = torch::empty({0});
    group.all_reduce(empty);
    at::Tensor mask = torch::full({4}, rank.number() == 1, torch::kBool);
    group.broadcast(mask, 1);
    EXPECT_TRUE(mask.all().item<bool>());

    EXPECT_EQ(group.broadcast(rank.number() == 0 ? std::string(100000, 'x') : ""),
              std::string(100000, 'x'));
    EXPECT_EQ(group.broadcast(std::string(rank.number() == 0 ? "" : "gone")), "");
    const auto strings =
        group.all_gather(std::string(static_cast<std::size_t>(3 * rank.number()), 'y'));
    EXPECT_EQ(strings, (std::vector<std::string>{"", "yyy"}));
    EXPECT_EQ(group.all_gather(std::string()), (std::vector<std::string>{"", ""}));

    // In any order of waiting.
    at::Tensor first = torch::full({1000}, 1.0);
    at::Tensor second = torch::full({1000}, 3.0);
    Work one = group.all_reduce_async(first);
    Work two = group.all_reduce_async(second, ReduceOp::mean);
    two.wait();
    one.wait();
    one.wait();
    EXPECT_TRUE(one.done());
    expect_equal(first, torch::full({1000}, 2.0));
    expect_equal(second, torch::full({1000}, 3.0));
  });
}

TEST(Collectives, ThatWriteATensorCountAsChangesInPlace) {
  run_ranks(2, [](Rank&) {
    const Group group = init();
    const std::vector<std::function<void(at::Tensor&)>> writers = {
        [&](at::Tensor& tensor) { group.all_reduce(tensor); },
        [&](at::Tensor& tensor) { group.all_reduce(tensor, ReduceOp::mean); },
        [&](at::Tensor& tensor) { group.all_reduce_async(tensor).wait(); },
        [&](at::Tensor& tensor) { group.broadcast(tensor); },
        [&](at::Tensor& tensor) { group.broadcast(std::vector<at::Tensor>{tensor}); },
    };
    for (std::size_t i = 0; i < writers.size(); ++i) {
      SCOPED_TRACE(i);
      at::Tensor parameter = torch::ones({3}).requires_grad_();
      const at::Tensor squares = (parameter * parameter).sum();
      const auto version = parameter._version();
      writers[i](parameter);
      EXPECT_GT(parameter._version(), version);
      EXPECT_THROW(squares.backward(), c10::Error);
      EXPECT_TRUE(parameter.is_leaf());
      EXPECT_TRUE(parameter.requires_grad());

      const c10::InferenceMode inference;
      at::Tensor without_version = torch::ones({3});
      writers[i](without_version);
    }
    at::Tensor flags = torch::ones({3}, torch::kBool);  // travels as bytes
    group.broadcast(flags);
    EXPECT_GT(flags._version(), 0);
    const at::Tensor input = torch::ones({3});
    group.all_gather(input);
    group.reduce_scatter(torch::ones({2}));
    EXPECT_EQ(input._version(), 0);
  });
}

TEST(Collectives, RefuseTensorsOfDevicesThatTheBackendDoesNotServe) {
  run_ranks(2, [](Rank&) {
    const Group group = init();
    EXPECT_EQ(group.device(), at::Device(at::kCPU));
    at::Tensor elsewhere = torch::empty({2}, torch::kMeta);
    const std::vector<at::Tensor> list = {elsewhere};
    expect_error([&] { group.all_reduce(elsewhere); },
                 {"[comm.all_reduce]", "a tensor on cpu", "backend gloo", "one on meta", "nccl"});
    expect_error([&] { group.all_gather(elsewhere); }, {"[comm.all_gather]", "one on meta"});
    expect_error([&] { group.broadcast(elsewhere); }, {"[comm.broadcast]", "one on meta"});
    expect_error([&] { group.broadcast(list); }, {"[comm.broadcast]", "one on meta"});
    group.barrier();
  });
}

TEST(Collectives, ReduceNotANumberToItself) {
  run_ranks(2, [](Rank& rank) {
    const Group group = init();
    at::Tensor tensor = torch::full({2}, rank.number() == 1 ? NAN : 1.f);
    group.all_reduce(tensor);
    EXPECT_TRUE(tensor.isnan().all().item<bool>());
  });
}

TEST(Collectives, CarryDtypesThatTheyCannotReduce) {
  run_ranks(2, [](Rank& rank) {
    const Group group = init();
    for (const auto dtype :
         {torch::kFloat8_e4m3fn, torch::kBool, torch::kShort, torch::kComplexFloat}) {
      SCOPED_TRACE(dtype);
      const at::Tensor zero = torch::zeros({2, 3}).to(dtype);
      const at::Tensor one = torch::ones({2, 3}).to(dtype);
      const auto is_one = [&](const at::Tensor& tensor) {
        return torch::equal(tensor.to(torch::kComplexDouble), one.to(torch::kComplexDouble));
      };
      at::Tensor tensor = (rank.number() == 0 ? one : zero).clone();
      expect_error([&] { group.all_reduce(tensor); }, {"[comm.all_reduce]", "convert"});
      const auto all = group.all_gather(tensor);
      EXPECT_TRUE(is_one(all[0]));
      EXPECT_FALSE(is_one(all[1]));
      group.broadcast(tensor);
      EXPECT_TRUE(is_one(tensor));
      std::vector<at::Tensor> list = {(rank.number() == 0 ? one : zero).clone()};
      group.broadcast(list);
      EXPECT_TRUE(is_one(list[0]));
    }
  });
}

TEST(Subgroups, CommunicateAmongTheirOwn) {
  run_ranks(4, [](Rank& rank) {
    const Group world = init();
    const Group pair = world.split(2);
    EXPECT_EQ(pair.size(), 2);
    EXPECT_EQ(pair.rank(), rank.number() % 2);
    at::Tensor tensor = torch::full({1}, rank.number());
    pair.all_reduce(tensor);
    EXPECT_EQ(tensor.item<std::int64_t>(), rank.number() < 2 ? 1 : 5);

    const Group odd = world.subgroup({1, 3});
    const Group even = world.subgroup({0, 2});
    EXPECT_EQ(odd.size(), rank.number() % 2 == 1 ? 2 : 1);
    const Group& mine = rank.number() % 2 == 1 ? odd : even;
    at::Tensor other = torch::full({1}, rank.number());
    mine.all_reduce(other);
    EXPECT_EQ(other.item<std::int64_t>(), rank.number() % 2 == 1 ? 4 : 2);

    // A subgroup of a subgroup, and all of it at the same time as the whole.
    EXPECT_EQ(pair.split(1).size(), 1);
    EXPECT_EQ(world.split(4).size(), 4);
    at::Tensor all = torch::ones({1});
    world.all_reduce(all);
    EXPECT_EQ(all.item<float>(), 4.f);
  });
}

TEST(Rendezvous, WorksWithAFileAndATcpUrl) {
  run_ranks(2, [](Rank& rank) {
    const std::string query = "?world_size=2&rank=" + std::to_string(rank.number());
    for (const std::string& url :
         {"file://" + (rank.folder() / "meet").string() + query,
          "tcp://localhost:" + std::string(std::getenv("MASTER_PORT")) + query}) {
      const Group group = init(url);
      at::Tensor one = torch::ones({1});
      group.all_reduce(one);
      EXPECT_EQ(one.item<float>(), 2.f);
    }
  });
}

// The local addresses in /proc/net/tcp and tcp6 of this process's sockets that listen, as the
// kernel writes them: hexadecimal, and in the byte order of the machine.
std::set<std::string> listening_addresses() {
  std::set<std::string> own;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    own.insert(std::filesystem::read_symlink(entry.path(), gone).string());
  }
  std::set<std::string> addresses;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(table);
    std::string line;
    std::getline(lines, line);
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      std::string number, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      words >> number >> local >> remote >> state >> queues >> timer >> retransmits >> user >>
          timeout >> inode;
      if (state == "0A" && own.count("socket:[" + inode + "]") > 0) {
        addresses.insert(local.substr(0, local.find(':')));
      }
    }
  }
  return addresses;
}

TEST(Rendezvous, ListensOnTheMastersInterfaceAlone) {
  run_ranks(2, [](Rank&) {
    EXPECT_EQ(listening_addresses(), std::set<std::string>{});
    const Group group = init();
    EXPECT_EQ(listening_addresses(), std::set<std::string>{"0100007F"});  // 127.0.0.1
    const Group pair = group.split(2);
    EXPECT_EQ(listening_addresses(), std::set<std::string>{"0100007F"});
    group.barrier();
  });
}

// Two real processes that meet and reduce, each with its own environment.
void expect_meeting(const std::function<std::map<std::string, std::string>(int)>& environment_of,
                    const InitOptions& options = {}) {
  run_ranks(2, [&](Rank& rank) {
    for (const auto& [name, value] : environment_of(rank.number()))
      ::setenv(name.c_str(), value.c_str(), 1);
    const Group group = init("env://", InitOptions(options).timeout(std::chrono::seconds(60)));
    at::Tensor sum = torch::full({1}, 1 + rank.number());
    group.all_reduce(sum);
    EXPECT_EQ(sum.item<std::int64_t>(), 3);
  });
}

std::string other_address() {
  return net::address_of_default_route().value_or("127.0.0.1");
}

// Kubernetes operators: MASTER_ADDR is localhost in the master's pod, and no variable gives local
// ranks.
std::map<std::string, std::string> environment_in_pod(const std::string& master) {
  return {{"LOCAL_RANK", ""}, {"LOCAL_WORLD_SIZE", ""}, {"MASTER_ADDR", master}};
}

TEST(Rendezvous, NeedsNoLocalRanksAndNoCommonNameOfTheMaster) {
  expect_meeting(
      [](int rank) { return environment_in_pod(rank == 0 ? "localhost" : other_address()); });
}

// As localhost is on some systems. Gloo connects addresses of one family only.
TEST(Rendezvous, NeedsNoCommonFamilyOfTheMastersAddress) {
  if (!std::filesystem::exists("/proc/net/if_inet6")) GTEST_SKIP() << "the kernel has no IPv6";
  expect_meeting([](int rank) { return environment_in_pod(rank == 0 ? "::1" : other_address()); });
}

// Not at the address that leads to their master, which may be of another family for each.
TEST(Rendezvous, RanksOfOneMachineConnectOnItsLoopbackInterface) {
  run_ranks(2, [](Rank& rank) {
    ::setenv("MASTER_ADDR", other_address().c_str(), 1);
    const Group group = init();
    if (rank.number() == 1) {  // rank 0 also has the store
      EXPECT_EQ(listening_addresses(), std::set<std::string>{"0100007F"});
    }
    group.barrier();
  });
}

TEST(Rendezvous, FollowsTheVariablesOfMpich) {
  expect_meeting([](int rank) -> std::map<std::string, std::string> {
    return {{"RANK", ""},
            {"WORLD_SIZE", ""},
            {"LOCAL_RANK", ""},
            {"LOCAL_WORLD_SIZE", ""},
            {"MASTER_ADDR", ""},
            {"PMI_RANK", std::to_string(rank)},
            {"PMI_SIZE", "2"},
            {"MPI_LOCALRANKID", std::to_string(rank)},
            {"MPI_LOCALNRANKS", "2"}};
  });
}

// A name in /etc/hosts that stands for 127.0.1.1, as Debian's installer writes it.
TEST(Rendezvous, WorksWhereTheMastersNameIsALoopbackAddressOnItsMachine) {
  expect_meeting([](int rank) -> std::map<std::string, std::string> {
    return {{"LOCAL_WORLD_SIZE", "1"},
            {"LOCAL_RANK", "0"},
            {"MASTER_ADDR", rank == 0 ? "127.0.1.1" : other_address()}};
  });
}

// A service's address, or that of a machine which forwards a port: not the master's own.
TEST(Rendezvous, WorksWhereTheMastersAddressIsNotItsOwn) {
  expect_meeting([](int rank) -> std::map<std::string, std::string> {
    return {{"MASTER_ADDR", rank == 0 ? "192.0.2.1" : "127.0.0.1"}};
  });
}

// Several launchers of one machine, on its loopback interface.
TEST(Rendezvous, WorksOnTheLoopbackInterfaceWithLaunchersOfSeveralNodes) {
  expect_meeting([](int) -> std::map<std::string, std::string> {
    return {{"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"MASTER_ADDR", "127.0.0.1"}};
  });
}

// At the store; the ranks then connect at 127.0.0.1.
TEST(Rendezvous, MeetsOverIpv6) {
  if (!std::filesystem::exists("/proc/net/if_inet6")) GTEST_SKIP() << "the kernel has no IPv6";
  expect_meeting(
      [](int) -> std::map<std::string, std::string> { return {{"MASTER_ADDR", "::1"}}; });
}

TEST(Rendezvous, ListensWhereItIsTold) {
  run_ranks(2, [](Rank& rank) {
    ::setenv("MASTER_ADDR", rank.number() == 0 ? "192.0.2.1" : "127.0.0.2", 1);
    const Group group = init("env://", InitOptions().bind_address("127.0.0.2").interface("lo"));
    EXPECT_EQ(listening_addresses(), rank.number() == 0
                                         ? (std::set<std::string>{"0100007F", "0200007F"})
                                         : std::set<std::string>{"0100007F"});
    group.barrier();
  });
}

// torchrun's store lives on when a node joins, and that is no restart.
TEST(Rendezvous, TakesPlaceAgainInAStoreThatALauncherHosts) {
  run_ranks(3, [](Rank& rank) {
    c10::intrusive_ptr<c10d::TCPStore> store;
    const auto ready = rank.folder() / "ready";
    if (rank.number() == 2) {  // the launcher
      c10d::TCPStoreOptions options;
      options.port = static_cast<std::uint16_t>(std::stoi(std::getenv("MASTER_PORT")));
      options.isServer = true;
      options.waitWorkers = false;
      store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
      std::ofstream(ready) << "ready";
    }
    EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(ready); }));
    ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    for (const int size : {2, 3}) {
      if (rank.number() < size) {
        ::setenv("WORLD_SIZE", std::to_string(size).c_str(), 1);
        ::setenv("LOCAL_WORLD_SIZE", std::to_string(size).c_str(), 1);
        const Group group = init("env://", InitOptions().timeout(std::chrono::seconds(60)));
        at::Tensor ones = torch::ones({1});
        group.all_reduce(ones);
        EXPECT_EQ(ones.item<float>(), static_cast<float>(size));
      }
    }
    // The store remains until all have used it.
    rank.meet();
  });
}

// A group of one has the device of the group that it is part of.
TEST(SingleProcess, KeepsItsDevice) {
  EXPECT_EQ(Group().device(), at::Device(at::kCPU));
  const auto impl = std::make_shared<Group::Impl>();
  impl->device = at::Device(at::kCUDA, 3);
  const Group group(impl);
  EXPECT_EQ(group.device(), at::Device(at::kCUDA, 3));
  EXPECT_EQ(group.split(1).device(), at::Device(at::kCUDA, 3));
  EXPECT_EQ(group.subgroup({0}).device(), at::Device(at::kCUDA, 3));
  EXPECT_EQ(group.split(1).backend(), "none");
}

}  // namespace
}  // namespace semitone::comm
