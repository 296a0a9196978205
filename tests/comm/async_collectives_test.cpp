// Collectives that return at once, against what they have to write.
#include "semitone/comm/group.h"
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "src/core/exact_weights.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"

#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace semitone::comm::async_collectives_test {
namespace {

using test::expect_error;
using test::Rank;
using test::RankOptions;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

// Exact in every dtype, other numbers on each rank.
at::Tensor rows_of(int rank, at::ScalarType dtype) {
  return (torch::arange(18, torch::kFloat).view({6, 3}).fmod(5) + 3 * rank).to(dtype);
}

void expect_equal(const at::Tensor& got, const at::Tensor& want) {
  EXPECT_EQ(got.scalar_type(), want.scalar_type());
  EXPECT_EQ(got.sizes(), want.sizes());
  EXPECT_TRUE(torch::equal(got, want)) << got << "\n" << want;
}

TEST(AsyncCollectives, MayAllBeInProgressAtTheSameTime) {
  run_ranks(3, [](Rank& rank) {
    const Group group = init();
    const int mine = rank.number();
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16,
                             torch::kLong, torch::kInt, torch::kChar, torch::kByte}) {
      SCOPED_TRACE(dtype);
      const at::Tensor own = rows_of(mine, dtype);
      at::Tensor sum = own.clone();
      at::Tensor of_root = own.clone();
      const Tensors gathered{torch::zeros_like(own), torch::zeros_like(own),
                             torch::zeros_like(own)};
      at::Tensor largest = torch::zeros({2, 3}, dtype);
      at::Tensor exchanged = torch::zeros_like(own);
      std::vector<Work> works{group.all_reduce_async(sum), group.broadcast_async(of_root, 2),
                              group.all_gather_async(gathered, own),
                              group.reduce_scatter_async(largest, own, ReduceOp::max),
                              group.all_to_all_async(exchanged, own)};
      at::Tensor mean = torch::zeros({2, 3}, dtype);
      if (own.is_floating_point())
        works.push_back(group.reduce_scatter_async(mean, own, ReduceOp::mean));
      for (std::size_t i = works.size(); i-- > 0;) {
        works[i].wait();
        EXPECT_TRUE(works[i].done());
      }
      const at::Tensor first = rows_of(0, dtype);
      expect_equal(sum, first * 3 + 9);
      expect_equal(of_root, rows_of(2, dtype));
      Tensors parts;
      for (int peer = 0; peer < 3; ++peer) {
        expect_equal(gathered[static_cast<std::size_t>(peer)], rows_of(peer, dtype));
        parts.push_back(rows_of(peer, dtype).narrow(0, 2 * mine, 2));
      }
      expect_equal(largest, parts[2]);
      expect_equal(exchanged, torch::cat(parts));
      if (own.is_floating_point()) expect_equal(mean, parts[1]);
      expect_equal(own, rows_of(mine, dtype));
    }
  });
}

TEST(AsyncCollectives, CarryDtypesThatTheyCannotReduce) {
  run_ranks(2, [](Rank& rank) {
    const Group group = init();
    for (const auto dtype : {torch::kShort, torch::kBool, torch::kComplexFloat}) {
      SCOPED_TRACE(dtype);
      const at::Tensor own = rows_of(rank.number(), dtype);
      at::Tensor of_root = own.clone();
      const Tensors gathered{torch::zeros_like(own), torch::zeros_like(own)};
      at::Tensor exchanged = torch::zeros_like(own);
      Work first = group.broadcast_async(of_root, 1);
      Work second = group.all_gather_async(gathered, own);
      group.all_to_all_async(exchanged, own).wait();
      second.wait();
      first.wait();
      expect_equal(of_root, rows_of(1, dtype));
      expect_equal(gathered[0], rows_of(0, dtype));
      expect_equal(gathered[1], rows_of(1, dtype));
      expect_equal(exchanged, torch::cat({rows_of(0, dtype).narrow(0, 3 * rank.number(), 3),
                                          rows_of(1, dtype).narrow(0, 3 * rank.number(), 3)}));
    }
  });
}

TEST(AsyncCollectives, OfASingleProcessAreDone) {
  const Group group;
  const at::Tensor own = rows_of(1, torch::kFloat);
  at::Tensor tensor = own.clone();
  EXPECT_TRUE(group.broadcast_async(tensor).done());
  group.broadcast_async(tensor).wait();
  expect_equal(tensor, own);
  const std::vector<std::function<Work(at::Tensor&)>> calls{
      [&](at::Tensor& output) { return group.all_gather_async({output}, own); },
      [&](at::Tensor& output) { return group.reduce_scatter_async(output, own, ReduceOp::mean); },
      [&](at::Tensor& output) { return group.all_to_all_async(output, own); }};
  for (const auto& call : calls) {
    at::Tensor output = torch::zeros_like(own);
    Work work = call(output);
    EXPECT_TRUE(work.done());
    work.wait();
    expect_equal(output, own);
  }
}

TEST(AsyncCollectives, RefuseOutputsThatDoNotFit) {
  const Group group;
  const at::Tensor tensor = rows_of(0, torch::kFloat);
  at::Tensor narrow = torch::zeros({6, 2});
  at::Tensor half = torch::zeros({6, 3}, torch::kHalf);
  at::Tensor transposed = torch::zeros({3, 6}).t();
  at::Tensor undefined;
  expect_error([&] { group.all_gather_async({}, tensor); },
               {"[comm.all_gather]", "1 outputs", "got 0"});
  expect_error([&] { group.all_gather_async({narrow}, tensor); },
               {"[comm.all_gather]", "output float32[6, 3]", "float32[6, 2]"});
  expect_error([&] { group.all_gather_async({undefined}, tensor); },
               {"[comm.all_gather]", "undefined"});
  expect_error([&] { group.reduce_scatter_async(half, tensor); },
               {"[comm.reduce_scatter]", "output float32[6, 3]", "float16[6, 3]"});
  expect_error([&] { group.reduce_scatter_async(transposed, tensor); },
               {"[comm.reduce_scatter]", "contiguous"});
  expect_error([&] { group.reduce_scatter_async(narrow, torch::zeros({})); },
               {"[comm.reduce_scatter]", "multiple of 1"});
  expect_error([&] { group.all_to_all_async(narrow, tensor); },
               {"[comm.all_to_all]", "output float32[6, 3]", "float32[6, 2]"});
  expect_error([&] { group.all_to_all_async(narrow, torch::zeros({})); },
               {"[comm.all_to_all]", "multiple of 1"});
  expect_error([&] { group.broadcast_async(transposed); }, {"[comm.broadcast]", "contiguous"});
  expect_error([&] { group.broadcast_async(narrow, 1); }, {"[comm.broadcast]", "root"});
}

// By the end of wait(), whether or not autograd records.
TEST(AsyncCollectives, CountAsChangesInPlaceOfWhatTheyWrite) {
  run_ranks(2, [](Rank&) {
    const Group group = init();
    const at::Tensor ones = torch::ones({4}).requires_grad_();
    const std::vector<std::function<Work(at::Tensor&)>> writers{
        [&](at::Tensor& output) { return group.broadcast_async(output); },
        [&](at::Tensor& output) {
          return group.all_gather_async({output, torch::zeros({4})}, ones);
        },
        [&](at::Tensor& output) {
          return group.reduce_scatter_async(output, torch::ones({8}).requires_grad_(),
                                            ReduceOp::mean);
        },
        [&](at::Tensor& output) { return group.all_to_all_async(output, ones); }};
    for (std::size_t i = 0; i < writers.size(); ++i) {
      SCOPED_TRACE(i);
      at::Tensor parameter = torch::ones({4}).requires_grad_();
      const at::Tensor squares = (parameter * parameter).sum();
      writers[i](parameter).wait();
      EXPECT_TRUE(torch::equal(parameter, torch::ones({4})));
      EXPECT_TRUE(parameter.is_leaf());
      EXPECT_THROW(squares.backward(), c10::Error);
      const c10::InferenceMode inference;
      at::Tensor without_version = torch::zeros({4});
      writers[i](without_version).wait();
    }
    EXPECT_EQ(ones._version(), 0);
  });
}

// Holds the exact value of a parameter, as a MixedPrecision does.
class Holder final : public ExactWeights {
 public:
  Tensors values_of(const Tensors& parameters) const override {
    return Tensors(parameters.size(), value);
  }
  void set(const at::Tensor&, const at::Tensor& exact) override {
    value = exact;
    thread = std::this_thread::get_id();
    ++calls;
  }
  at::Tensor value = torch::full({2}, 1.001);
  std::thread::id thread;
  int calls = 0;
};

TEST(AsyncCollectives, SetExactWeightsOnceOnTheThreadThatWaits) {
  run_ranks(2, [](Rank& rank) {
    const Group group = init();
    at::Tensor parameter = torch::full({2}, rank.number() + 1).to(torch::kBFloat16);
    const auto holder = std::make_shared<Holder>();
    announce_exact_weight(parameter, holder);
    Work work = group.broadcast_async(parameter, 1);
    const Work copy = work;
    while (!copy.done()) std::this_thread::yield();
    EXPECT_EQ(holder->calls, 0);
    work.wait();
    EXPECT_EQ(holder->calls, 1);
    EXPECT_EQ(holder->thread, std::this_thread::get_id());
    expect_equal(holder->value, torch::full({2}, 2.F));
    holder->value = torch::full({2}, 2.001F);  // a step
    work.wait();
    Work(copy).wait();
    EXPECT_EQ(holder->calls, 1);
    withdraw_exact_weight(parameter, holder.get());
  });
}

InitOptions quick(CheckLevel check) {
  return InitOptions()
      .heartbeat(std::chrono::milliseconds(50))
      .heartbeat_timeout(std::chrono::seconds(3))
      .timeout(std::chrono::minutes(10))
      .check(check);
}

TEST(AsyncCollectives, AreComparedByTheFullCheck) {
  const auto results = run_ranks(2, [](Rank& rank) {
    const Group group = init("env://", quick(CheckLevel::full));
    at::Tensor tensor = torch::zeros({2 + 2 * rank.number()});
    at::Tensor output = torch::zeros_like(tensor);
    at::Tensor part = torch::zeros({1 + rank.number()});
    const std::vector<std::function<Work()>> calls{
        [&] { return group.broadcast_async(tensor); },
        [&] { return group.all_gather_async({output, output.clone()}, tensor); },
        [&] { return group.reduce_scatter_async(part, tensor); },
        [&] { return group.all_to_all_async(output, tensor); },
        [&] {
          group.all_to_all(tensor);
          return group.all_reduce_async(tensor);
        }};
    for (const auto& call : calls) {
      try {
        call().wait();
        ADD_FAILURE() << "no error on rank " << rank.number();
      } catch (const CommError& error) {
        rank.report(error.what());
      }
    }
  });
  for (const auto& result : results) {
    ASSERT_EQ(result.reports.size(), 5u) << result.output;
    // Gloo has no reduce_scatter.
    const char* const names[] = {"broadcast", "all_gather", "all_reduce", "all_to_all",
                                 "all_to_all"};
    for (std::size_t i = 0; i < 5; ++i) {
      const std::string call = std::string(": ") + names[i] + " float32";
      EXPECT_THAT(result.reports[i],
                  AllOf(HasSubstr("rank 0" + call + "[2]"), HasSubstr("rank 1" + call + "[4]")));
    }
  }
}

// A rank dies while the others wait in each of the calls.
class LostInAsyncCollective : public ::testing::TestWithParam<std::string> {};

TEST_P(LostInAsyncCollective, IsNamedByAllOthers) {
  const std::string call = GetParam();
  RankOptions options;
  options.casualties = {1};
  const auto results = run_ranks(
      3,
      [&](Rank& rank) {
        const Group group = init("env://", quick(CheckLevel::none));
        rank.meet();
        if (rank.number() == 1) {
          // Time for the others to wait in the call.
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          std::raise(SIGKILL);
        }
        at::Tensor tensor = torch::ones({300000});
        at::Tensor part = torch::ones({100000});
        try {
          for (;;) {
            if (call == "broadcast") group.broadcast_async(tensor, 1).wait();
            if (call == "all_gather")
              group.all_gather_async({tensor.clone(), tensor.clone(), tensor.clone()}, tensor)
                  .wait();
            if (call == "reduce_scatter") group.reduce_scatter_async(part, tensor).wait();
            if (call == "all_to_all") group.all_to_all_async(tensor, tensor.clone()).wait();
          }
        } catch (const CommError& error) {
          rank.report(error.what());
        }
        EXPECT_THROW(group.broadcast_async(tensor), CommError);
      },
      options);
  for (const std::size_t rank : {0u, 2u}) {
    ASSERT_EQ(results[rank].reports.size(), 1u) << results[rank].output;
    EXPECT_THAT(results[rank].reports[0], HasSubstr("rank 1 lost: its process has ended"));
  }
}

INSTANTIATE_TEST_SUITE_P(Each, LostInAsyncCollective,
                         ::testing::Values("broadcast", "all_gather", "reduce_scatter",
                                           "all_to_all"));

}  // namespace
}  // namespace semitone::comm::async_collectives_test
