// collectives.json: what torch.distributed's collectives give on three ranks over Gloo, for all
// operations and dtypes, other roots than 0, empty tensors, and numbers without dimensions.
#include "semitone/comm/group.h"
#include "semitone/comm/init.h"
#include "semitone/core/dtype.h"
#include "tests/support/conformance.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace semitone::comm::collectives_conformance_test {
namespace {

using nlohmann::json;
using test::conformance;
using test::expect_bitwise_equal;
using test::expect_error;
using test::Rank;
using test::run_ranks;
using test::same_bits;

at::ScalarType dtype_of(const json& given) {
  for (const auto dtype :
       {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kLong, torch::kInt,
        torch::kChar, torch::kByte, torch::kShort, torch::kComplexFloat, torch::kBool}) {
    if (given.at("dtype") == dtype_name(dtype)) return dtype;
  }
  throw std::runtime_error("another dtype: " + given.at("dtype").dump());
}

ReduceOp op_of(const json& given) {
  for (const auto& [name, op] : {std::pair("sum", ReduceOp::sum),
                                 {"mean", ReduceOp::mean},
                                 {"min", ReduceOp::min},
                                 {"max", ReduceOp::max},
                                 {"product", ReduceOp::product}}) {
    if (given.at("op") == name) return op;
  }
  throw std::runtime_error("another operation: " + given.at("op").dump());
}

std::string description_of(const json& given) {
  std::string text;
  for (const auto* const key : {"op", "dtype", "shape", "factor", "infinite", "root"})
    if (given.contains(key)) text += given.at(key).dump() + " ";
  return text;
}

// As collectives.py defines it.
at::Tensor tensor_of(const json& given, int number) {
  const auto dtype = dtype_of(given);
  const auto shape = given.at("shape").get<std::vector<std::int64_t>>();
  const at::Tensor i = torch::arange(c10::multiply_integers(shape), torch::kLong);
  at::Tensor values = ((7 * i + 3 * number).remainder(5) + 1) * given.value("factor", 1);
  if (dtype == torch::kBool) {
    values = values.remainder(2);
  } else if (dtype != torch::kByte) {
    values = torch::where(i.remainder(2) == 1, -values, values);
  }
  if (c10::isComplexType(dtype))
    values = torch::complex(values.to(torch::kFloat), values.to(torch::kFloat) + 1);
  const at::Tensor tensor = values.to(dtype);
  if (given.value("infinite", false)) {
    const double infinity = std::numeric_limits<double>::infinity();
    tensor[number == 0 ? 1 : 0] = number == 2 ? -infinity : infinity;
  }
  return tensor.view(shape);
}

// All numbers of a result, as one flat tensor.
at::Tensor result(const json& values, at::ScalarType dtype) {
  std::vector<double> numbers;
  for (const json& value : values) numbers.push_back(test::number(value));
  const at::Tensor flat = torch::tensor(numbers, torch::kDouble);
  return c10::isComplexType(dtype) ? torch::view_as_complex(flat.view({-1, 2})).to(dtype)
                                   : flat.to(dtype);
}

// A rank's part of a result in which each rank has its own.
at::Tensor part_of(const at::Tensor& result, int rank) {
  const std::int64_t elements = result.numel() / 3;
  return result.narrow(0, rank * elements, elements);
}

TEST(CollectivesConformance, ReduceToTheValuesOfTorch) {
  run_ranks(3, [](Rank& rank) {
    const Group group = init();
    const json data = conformance("collectives.json");
    for (const json& given : data.at("reductions")) {
      SCOPED_TRACE(description_of(given));
      const auto dtype = dtype_of(given);
      const auto op = op_of(given);
      const int root = given.at("root");
      const at::Tensor own = tensor_of(given, rank.number());

      at::Tensor tensor = own.clone();
      group.reduce(tensor, root, op);
      // torch leaves partial results in the tensors of the other ranks.
      const bool receives = rank.number() == root;
      expect_bitwise_equal(tensor.view(-1),
                           receives ? result(given.at("reduce"), dtype) : own.view(-1));

      tensor = own.clone();
      group.all_reduce(tensor, op);
      EXPECT_EQ(tensor.sizes(), own.sizes());
      expect_bitwise_equal(tensor.view(-1), result(given.at("all_reduce"), dtype));

      if (!given.contains("reduce_scatter")) continue;
      expect_bitwise_equal(group.reduce_scatter(own, op).view(-1),
                           part_of(result(given.at("reduce_scatter"), dtype), rank.number()));
    }
  });
}

TEST(CollectivesConformance, DeliverWhatTorchDelivers) {
  run_ranks(3, [](Rank& rank) {
    const Group group = init();
    const int mine = rank.number();
    const json data = conformance("collectives.json");
    for (const json& given : data.at("messages")) {
      SCOPED_TRACE(description_of(given));
      const auto dtype = dtype_of(given);
      const int root = given.at("root");
      const at::Tensor own = tensor_of(given, mine);
      // torch refuses some dtypes in some collectives; Semitone carries all of them.
      const auto compare = [&](const char* collective, const at::Tensor& got, bool of_rank) {
        SCOPED_TRACE(collective);
        const json& values = given.at(collective);
        if (values.is_null()) return;
        const at::Tensor want = result(values, dtype);
        expect_bitwise_equal(got.view(-1), of_rank ? part_of(want, mine) : want);
      };
      const auto stacked = [](const std::vector<at::Tensor>& tensors) {
        return torch::stack(tensors);
      };

      at::Tensor tensor = own.clone();
      group.broadcast(tensor, root);
      compare("broadcast", tensor, false);
      compare("all_gather", stacked(group.all_gather(own)), false);

      const auto gathered = group.gather(own, root);
      ASSERT_EQ(gathered.size(), mine == root ? 3u : 0u);
      if (mine == root) compare("gather", stacked(gathered), false);

      std::vector<at::Tensor> parts;
      for (int to = 0; to < 3 && mine == root; ++to) parts.push_back(tensor_of(given, 3 + to));
      tensor = torch::zeros_like(own);
      group.scatter(tensor, parts, root);
      compare("scatter", tensor, true);

      if (own.dim() > 0) compare("all_to_all", group.all_to_all(own), true);

      // Around the ring, two messages with one tag.
      const auto send = [&] {
        group.send(own, (mine + 1) % 3, 5);
        group.send(tensor_of(given, 3 + mine), (mine + 1) % 3, 5);
      };
      std::vector<at::Tensor> received{torch::zeros_like(own), torch::zeros_like(own)};
      if (mine == 0) send();
      for (at::Tensor& each : received) group.recv(each, (mine + 2) % 3, 5);
      if (mine != 0) send();
      compare("send_recv", stacked(received), true);
    }
  });
}

// As collectives.py defines them.
at::Tensor strided(const std::string& layout, int rank) {
  const at::Tensor storage = (torch::arange(12, torch::kFloat) + 10 * rank).view({3, 4});
  return layout == "transposed" ? storage.t() : storage.narrow(1, 0, 2);
}

// torch takes the first numel() elements of the storage, as if a tensor had no gaps. This is right
// for a transposed matrix, and reduces or overwrites other elements of a slice.
TEST(CollectivesConformance, RefuseTensorsWithGapsWhichTorchReadsWrongly) {
  run_ranks(3, [](Rank& rank) {
    const Group group = init();
    const json data = conformance("collectives.json");
    for (const json& given : data.at("strided")) {
      const std::string layout = given.at("layout");
      SCOPED_TRACE(layout);
      const bool has_gaps = layout == "sliced";
      const auto of_torch = [&](const char* collective) {
        return part_of(result(given.at(collective), torch::kFloat), rank.number());
      };
      at::Tensor tensor = strided(layout, rank.number());
      expect_error([&] { group.all_reduce(tensor); }, {"[comm.all_reduce]", "contiguous"});
      expect_error([&] { group.broadcast(tensor, 1); }, {"[comm.broadcast]", "contiguous"});

      at::Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
      group.all_reduce(sum);
      expect_bitwise_equal(sum, strided(layout, 0) + strided(layout, 1) + strided(layout, 2));
      EXPECT_EQ(bool(same_bits(of_torch("all_reduce"), sum.view(-1))), !has_gaps);

      // A broadcast of a list takes any strides.
      group.broadcast(std::vector<at::Tensor>{tensor}, 1);
      expect_bitwise_equal(tensor, strided(layout, 1));
      EXPECT_EQ(bool(same_bits(of_torch("broadcast"), tensor.reshape(-1))),
                !has_gaps || rank.number() == 1);
    }
  });
}

}  // namespace
}  // namespace semitone::comm::collectives_conformance_test
