#include "semitone/parallel/sync_batch_norm.h"

#include "semitone/comm/init.h"
#include "tests/support/conformance.h"
#include "tests/support/run_ranks.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <vector>

namespace semitone::parallel {
namespace {

using nlohmann::json;

// Of norms.json in fp64.
constexpr double kRelative = 1e-9;
constexpr double kAbsolute = 1e-11;

// {"shape": …, "data": …}, or a flat list, or null.
at::Tensor tensor_of(const json& record) {
  if (record.is_null()) return {};
  std::vector<double> values;
  for (const json& value : record.is_object() ? record.at("data") : record)
    values.push_back(test::number(value));
  const at::Tensor flat = torch::tensor(values, torch::kDouble);
  return record.is_object() ? flat.view(record.at("shape").get<std::vector<std::int64_t>>()) : flat;
}

void expect_near(const at::Tensor& got, const at::Tensor& want, const char* what) {
  SCOPED_TRACE(what);
  ASSERT_EQ(got.defined(), want.defined());
  if (!got.defined()) return;
  ASSERT_EQ(got.sizes(), want.sizes());
  EXPECT_TRUE(torch::allclose(got, want, kRelative, kAbsolute, /*equal_nan=*/true))
      << got << "\nwant\n"
      << want;
}

void set(at::Tensor& tensor, const json& value) {
  if (tensor.defined()) tensor.set_data(tensor_of(value));
}

// The shard of a rank's rows, all on dimension 0.
struct Shard {
  std::int64_t begin;
  std::int64_t rows;

  at::Tensor of(const at::Tensor& whole) const { return whole.narrow(0, begin, rows); }
};

void run_case(const json& record, const comm::Group& group) {
  const auto rows = record.at("shards").get<std::vector<std::int64_t>>();
  const auto rank = static_cast<std::size_t>(group.rank());
  const Shard shard{std::accumulate(rows.begin(), rows.begin() + group.rank(), std::int64_t{0}),
                    rows[rank]};
  const json& momentum = record.at("momentum");
  const auto channels = record.at("calls").at(0).at("input").at("shape").at(1).get<std::int64_t>();
  SyncBatchNorm layer(
      nn::FusedBatchNormOptions(channels)
          .eps(record.at("eps"))
          .momentum(momentum.is_null() ? std::nullopt : std::optional<double>(momentum))
          .affine(!record.at("weight").is_null())
          .track_running_stats(!record.at("before").is_null()),
      group);
  layer->train(record.at("train"));
  set(layer->weight, record.at("weight"));
  set(layer->bias, record.at("bias"));
  if (!record.at("before").is_null()) {
    const json& before = record.at("before");
    set(layer->running_mean, before.at("running_mean"));
    set(layer->running_var, before.at("running_var"));
    layer->num_batches_tracked.fill_(before.at("num_batches_tracked").get<std::int64_t>());
  }

  for (const json& call : record.at("calls")) {
    layer->zero_grad();
    const at::Tensor input = shard.of(tensor_of(call.at("input"))).clone().requires_grad_();
    const at::Tensor output = layer->forward(input);
    output.backward(shard.of(tensor_of(call.at("grad_output"))));
    expect_near(output.detach(), shard.of(tensor_of(call.at("output"))), "output");
    expect_near(input.grad(), shard.of(tensor_of(call.at("grad_input"))), "grad_input");
    if (layer->weight.defined()) {
      expect_near(layer->weight.grad(), tensor_of(call.at("shard_grad_weight").at(rank)),
                  "shard_grad_weight");
      expect_near(layer->bias.grad(), tensor_of(call.at("shard_grad_bias").at(rank)),
                  "shard_grad_bias");
      at::Tensor weight_sum = layer->weight.grad().clone();
      at::Tensor bias_sum = layer->bias.grad().clone();
      group.all_reduce(weight_sum);
      group.all_reduce(bias_sum);
      expect_near(weight_sum, tensor_of(call.at("grad_weight")), "grad_weight");
      expect_near(bias_sum, tensor_of(call.at("grad_bias")), "grad_bias");
    }
    if (!call.at("after").is_null()) {
      expect_near(layer->running_mean, tensor_of(call.at("after").at("running_mean")),
                  "running_mean");
      expect_near(layer->running_var, tensor_of(call.at("after").at("running_var")), "running_var");
      EXPECT_EQ(layer->num_batches_tracked.item<std::int64_t>(),
                call.at("after").at("num_batches_tracked").get<std::int64_t>());
    }
  }
}

TEST(SyncBatchNormConformance, ShardsGiveWhatTheWholeBatchGives) {
  const json cases = test::conformance("norms.json").at("sync_batch_norm");
  ASSERT_FALSE(cases.empty());
  std::size_t most = 1;
  for (const json& record : cases) most = std::max(most, record.at("shards").size());
  test::run_ranks(static_cast<int>(most), [&](test::Rank& rank) {
    const comm::Group world = comm::init();
    for (const json& record : cases) {
      SCOPED_TRACE(record.at("name").get<std::string>());
      std::vector<int> members(record.at("shards").size());
      std::iota(members.begin(), members.end(), 0);
      const comm::Group group = world.subgroup(members);
      if (rank.number() < static_cast<int>(members.size())) run_case(record, group);
    }
  });
}

}  // namespace
}  // namespace semitone::parallel
