// Communication between processes: the collectives of a group, messages between two ranks, and
// groups of some of the ranks. The program starts its two processes itself (spawn.cpp).
#include <semitone/launch/spawn.h>
#include <semitone/semitone.h>

#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

namespace comm = semitone::comm;

namespace {

void require(bool right, const char* what) {
  if (!right) throw semitone::Error("collectives", what, "something else");
}

// A group from an address and numbers that the program knows. comm::init() without arguments takes
// them from the variables that the launchers set.
comm::Group meet(int rank, int world_size) {
  const char* port = std::getenv("MASTER_PORT");
  return comm::init("tcp://127.0.0.1:" + std::string(port == nullptr ? "29500" : port),
                    comm::InitOptions()
                        .backend("gloo")
                        .rank(rank)
                        .world_size(world_size)
                        .timeout(std::chrono::minutes(5))
                        .check(comm::CheckLevel::full));  // or SEMITONE_COMM_CHECK=full, to debug
}

void run(const comm::Group& group) {
  const int rank = group.rank();
  const int size = group.size();
  const auto mine = [&] { return torch::full({4}, rank + 1.0); };  // 1 on rank 0, 2 on rank 1

  // Collectives with a result on all ranks.
  auto sum = mine();
  group.all_reduce(sum);
  auto mean = mine();
  group.all_reduce(mean, comm::ReduceOp::mean);
  auto from_root = mine();
  group.broadcast(from_root);
  require(sum.equal(torch::full({4}, 3.)) && mean.equal(torch::full({4}, 1.5)) &&
              from_root.equal(torch::ones({4})),
          "3, 1.5 and 1");
  const auto all = group.all_gather(mine());
  const auto part = group.reduce_scatter(mine());  // a half of the sum
  const auto exchanged = group.all_to_all(mine());
  require(torch::cat(all).equal(torch::tensor({1., 1., 1., 1., 2., 2., 2., 2.})) &&
              part.equal(torch::full({2}, 3.)) && exchanged.equal(torch::tensor({1., 1., 2., 2.})),
          "parts of all ranks");
  const std::vector<torch::Tensor> outputs = {torch::empty({3}), torch::empty({3})};
  group.all_to_all(outputs, {torch::full({3}, 10. * rank), torch::full({3}, 10. * rank + 1)});
  require(outputs[1].equal(torch::full({3}, 10. + rank)), "what rank 1 had for this rank");

  // Collectives to or from one rank, the root.
  auto reduced = mine();
  group.reduce(reduced, /*root=*/0);
  const auto gathered = group.gather(mine(), 0);
  auto scattered = torch::empty({4});
  std::vector<torch::Tensor> parts;
  if (rank == 0) parts = {torch::zeros({4}), torch::ones({4})};
  group.scatter(scattered, parts, 0);
  require(rank != 0 || (reduced.equal(sum) && gathered.size() == 2), "the sum on rank 0");
  require(scattered.equal(torch::full({4}, double(rank))), "this rank's part");

  // Messages between two ranks.
  auto received = torch::empty({4});
  if (rank == 0) {
    group.send(mine(), /*to=*/1);
  } else if (rank == 1) {
    group.recv(received, /*from=*/0);
    require(received.equal(torch::ones({4})), "what rank 0 has sent");
  }

  // Strings of any length.
  const std::string text = group.broadcast(rank == 0 ? std::string("first") : std::string());
  const std::vector<std::string> names = group.all_gather("rank " + std::to_string(rank));
  require(text == "first" && names[1] == "rank 1", "strings of the other rank");

  // Asynchronous collectives: the process can compute until it waits.
  auto late = mine();
  const std::vector<torch::Tensor> gathers = {torch::empty({4}), torch::empty({4})};
  auto half = torch::empty({2});
  auto swapped = torch::empty({4});
  auto sent = mine();
  std::vector<comm::Work> works = {group.all_reduce_async(late), group.broadcast_async(sent),
                                   group.all_gather_async(gathers, all[0]),
                                   group.reduce_scatter_async(half, all[0]),
                                   group.all_to_all_async(swapped, all[0])};
  for (auto& work : works) work.wait();
  require(late.equal(sum) && sent.equal(torch::ones({4})), "the same results");

  // Groups of some of the ranks. All ranks of the group make these calls.
  const auto subgroup = group.subgroup({1});
  const auto node = group.split(1);  // parts of one rank each
  require(subgroup.size() == 1 && node.size() == 1, "groups of one rank");

  group.monitored_barrier(std::chrono::seconds(60));  // names the ranks that do not arrive
  group.barrier();
  if (rank == 0) std::cout << size << " processes agree\n";
}

}  // namespace

int main() try {
  return semitone::launch::spawn([](int local_rank) { run(meet(local_rank, 2)); }, 2).exit_code();
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
