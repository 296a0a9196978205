// reduce, gather, scatter, all_to_all, send and recv.
#include "semitone/comm/group.h"
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace semitone::comm::exchanges_test {
namespace {

using test::expect_error;
using test::Rank;
using test::RankOptions;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Tensors = std::vector<at::Tensor>;

InitOptions quick() {
  return InitOptions()
      .heartbeat(std::chrono::milliseconds(50))
      .heartbeat_timeout(std::chrono::seconds(3))
      .timeout(std::chrono::minutes(10));
}

// Exact in every dtype of two or more bits: what `from` sends to `to`.
at::Tensor parcel(int from, int to, std::int64_t rows, at::ScalarType dtype) {
  return (torch::arange(3 * rows, torch::kFloat).view({rows, 3}).fmod(4) + (10 * from + to))
      .to(dtype);
}

void expect_equal(const at::Tensor& got, const at::Tensor& want) {
  EXPECT_EQ(got.scalar_type(), want.scalar_type());
  EXPECT_EQ(got.sizes(), want.sizes());
  EXPECT_TRUE(torch::equal(got.to(torch::kComplexDouble), want.to(torch::kComplexDouble)))
      << got << "\n"
      << want;
}

// Zero rows for one pair, and different numbers for all others.
std::int64_t rows_of(int from, int to) {
  return (2 * from + to) % 4;
}

TEST(Exchanges, OfASingleProcessReturnAtOnce) {
  const Group group;
  at::Tensor tensor = parcel(1, 2, 2, torch::kFloat);
  const at::Tensor same = tensor.clone();
  group.reduce(tensor, 0, ReduceOp::mean);
  expect_equal(tensor, same);
  expect_equal(group.gather(tensor).at(0), same);
  expect_equal(group.all_to_all(tensor), same);
  expect_equal(group.all_to_all(tensor, {2}, {2}), same);
  at::Tensor received = torch::zeros_like(tensor);
  group.scatter(received, {tensor});
  expect_equal(received, same);
  at::Tensor flat = torch::zeros({6});
  group.all_to_all(Tensors{flat}, Tensors{tensor});
  expect_equal(flat, same.view(-1));
}

TEST(Exchanges, RefuseWhatCannotBeSentBeforeSending) {
  const Group group;
  at::Tensor tensor = parcel(0, 0, 2, torch::kFloat);
  at::Tensor transposed = tensor.t();
  at::Tensor integers = tensor.to(torch::kLong);
  expect_error([&] { group.reduce(transposed); }, {"[comm.reduce]", "contiguous"});
  expect_error([&] { group.reduce(integers, 0, ReduceOp::mean); }, {"[comm.reduce]", "floating"});
  expect_error([&] { group.reduce(tensor, 1); }, {"[comm.reduce]", "root", "0 to 0"});
  expect_error([&] { group.gather(transposed); }, {"[comm.gather]", "contiguous"});
  expect_error([&] { group.gather(tensor, -1); }, {"[comm.gather]", "root"});
  expect_error([&] { group.scatter(tensor, {}); }, {"[comm.scatter]", "1 tensors", "got 0"});
  expect_error([&] { group.scatter(tensor, {integers}); },
               {"[comm.scatter]", "float32[2, 3]", "int64[2, 3]"});
  expect_error([&] { group.scatter(tensor, {transposed}); }, {"[comm.scatter]", "contiguous"});
  expect_error([&] { group.all_to_all(torch::zeros({})); }, {"[comm.all_to_all]", "multiple"});
  expect_error([&] { group.all_to_all(tensor, {1}, {1}); }, {"sum of input_splits", "[2, 3]"});
  expect_error([&] { group.all_to_all(tensor, {2, 0}, {2}); }, {"1 extents in input_splits"});
  expect_error([&] { group.all_to_all(tensor, {2}, {-2}); }, {"1 extents in output_splits"});
  expect_error([&] { group.all_to_all(tensor, {2}, {1}); }, {"rank 0", "which expects 1"});
  expect_error([&] { group.all_to_all(Tensors{}, Tensors{tensor}); }, {"1 outputs and 1 inputs"});
  expect_error([&] { group.all_to_all(Tensors{integers}, Tensors{tensor}); },
               {"one dtype", "float32 and int64"});
  expect_error([&] { group.send(tensor, 0); }, {"[comm.send]", "another rank"});
  expect_error([&] { group.recv(tensor, 1); }, {"[comm.recv]", "another rank"});
  expect_error([&] { group.recv(transposed, 1); }, {"[comm.recv]", "contiguous"});
}

TEST(Exchanges, CarryEveryDtype) {
  run_ranks(3, [](Rank& rank) {
    const Group group = init();
    const int mine = rank.number();
    for (const auto dtype :
         {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kLong, torch::kInt,
          torch::kChar, torch::kByte, torch::kShort, torch::kComplexFloat, torch::kBool}) {
      SCOPED_TRACE(dtype);
      const auto gathered = group.gather(parcel(mine, 0, 2, dtype), 1);
      ASSERT_EQ(gathered.size(), mine == 1 ? 3u : 0u);
      for (int from = 0; from < 3 && mine == 1; ++from)
        expect_equal(gathered[static_cast<std::size_t>(from)], parcel(from, 0, 2, dtype));

      Tensors parts;
      for (int to = 0; to < 3 && mine == 2; ++to) parts.push_back(parcel(2, to, 2, dtype));
      at::Tensor part = torch::zeros({2, 3}, dtype);
      group.scatter(part, parts, 2);
      expect_equal(part, parcel(2, mine, 2, dtype));

      Tensors sent;
      Tensors due;
      Tensors sent_unevenly;
      Tensors due_unevenly;
      std::vector<std::int64_t> input_splits;
      std::vector<std::int64_t> output_splits;
      Tensors outputs;
      for (int peer = 0; peer < 3; ++peer) {
        sent.push_back(parcel(mine, peer, 2, dtype));
        due.push_back(parcel(peer, mine, 2, dtype));
        input_splits.push_back(rows_of(mine, peer));
        output_splits.push_back(rows_of(peer, mine));
        sent_unevenly.push_back(parcel(mine, peer, input_splits.back(), dtype));
        due_unevenly.push_back(parcel(peer, mine, output_splits.back(), dtype));
        // The receiver's shape need not be the sender's.
        outputs.push_back(torch::zeros({3, output_splits.back()}, dtype));
      }
      expect_equal(group.all_to_all(torch::cat(sent)), torch::cat(due));
      expect_equal(group.all_to_all(torch::cat(sent_unevenly), input_splits, output_splits),
                   torch::cat(due_unevenly));
      group.all_to_all(outputs, sent_unevenly);
      for (std::size_t peer = 0; peer < 3; ++peer)
        expect_equal(outputs[peer].view(-1), due_unevenly[peer].view(-1));

      // Around the ring.
      at::Tensor received = torch::zeros({2, 3}, dtype);
      const auto pass_on = [&] { group.send(parcel(mine, 7, 2, dtype), (mine + 1) % 3, 5); };
      if (mine == 0) pass_on();
      group.recv(received, (mine + 2) % 3, 5);
      if (mine != 0) pass_on();
      expect_equal(received, parcel((mine + 2) % 3, 7, 2, dtype));
    }
    // Nothing at all.
    expect_equal(group.all_to_all(torch::zeros({0, 3})), torch::zeros({0, 3}));
    EXPECT_EQ(group.gather(torch::zeros({0}), 0).size(), mine == 0 ? 3u : 0u);
  });
}

TEST(Exchanges, ReduceToTheRootAlone) {
  run_ranks(3, [](Rank& rank) {
    const Group group = init();
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16,
                             torch::kLong, torch::kInt, torch::kChar, torch::kByte}) {
      SCOPED_TRACE(dtype);
      const at::Tensor base = (torch::arange(6, torch::kFloat).view({2, 3}) + 1).to(dtype);
      const auto reduced = [&](ReduceOp op) {
        at::Tensor tensor = base + rank.number();
        const auto version = tensor._version();
        group.reduce(tensor, 1, op);
        if (rank.number() != 1) expect_equal(tensor, base + rank.number());
        EXPECT_EQ(tensor._version() > version, rank.number() == 1);
        return rank.number() == 1 ? tensor : at::Tensor();
      };
      const auto expect = [&](const at::Tensor& got, const at::Tensor& want) {
        if (rank.number() == 1) expect_equal(got, want);
      };
      expect(reduced(ReduceOp::sum), base * 3 + 3);
      expect(reduced(ReduceOp::min), base);
      expect(reduced(ReduceOp::max), base + 2);
      if (base.is_floating_point()) expect(reduced(ReduceOp::mean), base + 1);
    }
    // One rank's NaN.
    at::Tensor tensor = torch::full({2}, rank.number() == 2 ? NAN : 1.F);
    group.reduce(tensor);
    EXPECT_EQ(tensor.isnan().all().item<bool>(), rank.number() != 1);
    // Of a subgroup.
    const Group pair = group.subgroup({0, 2});
    at::Tensor one = torch::ones({1});
    if (rank.number() != 1) pair.reduce(one, 1);
    EXPECT_EQ(one.item<float>(), rank.number() == 2 ? 2.F : 1.F);
  });
}

TEST(Exchanges, CountAsChangesInPlaceWhereTheyWrite) {
  run_ranks(2, [](Rank& rank) {
    const Group group = init();
    const int other = 1 - rank.number();
    const std::vector<std::function<void(at::Tensor&)>> writers = {
        [&](at::Tensor& tensor) { group.scatter(tensor, {torch::ones({3}), torch::ones({3})}); },
        [&](at::Tensor& tensor) {
          group.all_to_all(Tensors{tensor, torch::zeros({3})},
                           Tensors{torch::ones({3}), torch::ones({3})});
        },
        [&](at::Tensor& tensor) {
          if (rank.number() == 0) group.send(torch::ones({3}), other);
          group.recv(tensor, other);
          if (rank.number() == 1) group.send(torch::ones({3}), other);
        }};
    for (std::size_t i = 0; i < writers.size(); ++i) {
      SCOPED_TRACE(i);
      at::Tensor parameter = torch::zeros({3}).requires_grad_();
      const at::Tensor squares = (parameter * parameter).sum();
      writers[i](parameter);
      EXPECT_TRUE(torch::equal(parameter, torch::ones({3})));
      EXPECT_TRUE(parameter.is_leaf());
      EXPECT_THROW(squares.backward(), c10::Error);
    }
    // Gathering reads only.
    const at::Tensor parameter = torch::ones({2}).requires_grad_();
    const auto gathered = group.gather(parameter);
    EXPECT_EQ(parameter._version(), 0);
    for (const at::Tensor& each : gathered) EXPECT_FALSE(each.requires_grad());
    EXPECT_FALSE(group.all_to_all(parameter).requires_grad());
  });
}

// What a call throws on a rank that is not to blame.
template <typename Function>
void report_error(const Rank& rank, Function&& function) {
  try {
    function();
    ADD_FAILURE() << "no error on rank " << rank.number();
  } catch (const CommError& error) {
    rank.report(error.what());
  }
}

TEST(Exchanges, TellEveryRankHowTheCallsDiffer) {
  const auto results = run_ranks(2, [](Rank& rank) {
    const Group group = init("env://", quick());
    const int mine = rank.number();
    at::Tensor tensor = torch::zeros({4, 2});
    report_error(rank, [&] { group.reduce(tensor, mine); });
    report_error(rank, [&] { group.gather(tensor.slice(0, mine), 0); });
    report_error(rank, [&] { group.all_to_all(tensor, {1, 3}, {1, 2}); });
    at::Tensor other = torch::zeros({5}, torch::kHalf);
    report_error(rank, [&] {
      if (mine == 0) group.send(tensor, 1);
      if (mine == 1) group.recv(other, 0);
    });
    // The group is still usable.
    at::Tensor one = torch::ones({1});
    group.all_reduce(one);
    EXPECT_EQ(one.item<float>(), 2.F);
  });
  for (const auto& result : results) {
    ASSERT_EQ(result.reports.size(), 4u) << result.output;
    EXPECT_THAT(result.reports[0], AllOf(HasSubstr("rank 0: reduce float32[4, 2] to rank 0"),
                                         HasSubstr("rank 1: reduce float32[4, 2] to rank 1")));
    EXPECT_THAT(result.reports[1], AllOf(HasSubstr("rank 0: gather float32[4, 2] to rank 0"),
                                         HasSubstr("rank 1: gather float32[3, 2] to rank 0")));
    EXPECT_THAT(result.reports[2], HasSubstr("3 for rank 1 from rank 0, which expects 1"));
    EXPECT_THAT(result.reports[3],
                HasSubstr("float32[4, 2] from rank 0, which rank 1 receives as float16[5]"));
  }
}

// Waits for a rank that dies meanwhile, in each kind of call.
class LostInExchange : public ::testing::TestWithParam<std::string> {};

TEST_P(LostInExchange, IsNamedByAllOthers) {
  const std::string call = GetParam();
  RankOptions options;
  options.casualties = {1};
  const auto results = run_ranks(
      3,
      [&](Rank& rank) {
        // Without the comparison of calls, which would notice the loss first.
        const Group group = init("env://", quick().check(CheckLevel::none));
        rank.meet();
        if (rank.number() == 1) {
          // Time for the others to wait in the call.
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          std::raise(SIGKILL);
        }
        at::Tensor tensor = torch::ones({300000});
        report_error(rank, [&] {
          for (;;) {
            if (call == "reduce") group.reduce(tensor, 0);
            if (call == "gather") group.gather(tensor, 2);
            if (call == "scatter") group.scatter(tensor, {tensor, tensor, tensor}, 1);
            if (call == "all_to_all") group.all_to_all(tensor);
            if (call == "send" && rank.number() == 0) group.send(tensor, 1);
            if (call == "send" && rank.number() == 2) group.recv(tensor, 1);
          }
        });
        EXPECT_THROW(group.barrier(), CommError);
      },
      options);
  for (const std::size_t rank : {0u, 2u}) {
    ASSERT_EQ(results[rank].reports.size(), 1u) << results[rank].output;
    EXPECT_THAT(results[rank].reports[0], HasSubstr("rank 1 lost: its process has ended"));
  }
}

INSTANTIATE_TEST_SUITE_P(Each, LostInExchange,
                         ::testing::Values("reduce", "gather", "scatter", "all_to_all", "send"));

}  // namespace
}  // namespace semitone::comm::exchanges_test
